package group

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/symmem/symmem/group/internal/pb"
)

// answerCodec is the protobuf codec, except that the blobs of an outcome stay where they were received: those of a thousand ranks are not copied
// once more.
type answerCodec struct{ encoding.CodecV2 }

func newAnswerCodec() answerCodec { return answerCodec{encoding.GetCodecV2("proto")} }

// Unmarshal reads a message.
func (c answerCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(*pb.ServerMessage); ok {
		return readAnswer(data.Materialize(), m)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// The numbers of the fields in rendezvous.proto.
const (
	outcomeField protowire.Number = 4 // of ServerMessage
	dataField    protowire.Number = 3 // of Outcome
)

// readAnswer is proto.Unmarshal, except that the data of an outcome is a part of b.
func readAnswer(b []byte, m *pb.ServerMessage) error {
	number, kind, n := protowire.ConsumeTag(b)
	if n < 0 || number != outcomeField || kind != protowire.BytesType {
		return proto.Unmarshal(b, m)
	}
	body, length := protowire.ConsumeBytes(b[n:])
	if length < 0 || n+length != len(b) { // it has more than one field, as none has that the service sends
		return proto.Unmarshal(b, m)
	}
	var data []byte
	var rest []byte
	for len(body) > 0 {
		number, kind, n := protowire.ConsumeField(body)
		switch {
		case n < 0:
			return proto.Unmarshal(b, m) // which says what is wrong
		case number == dataField && kind == protowire.BytesType:
			_, _, tag := protowire.ConsumeTag(body)
			data, _ = protowire.ConsumeBytes(body[tag:n])
		default:
			rest = append(rest, body[:n]...)
		}
		body = body[n:]
	}
	o := new(pb.Outcome)
	if err := proto.Unmarshal(rest, o); err != nil {
		return err
	}
	o.Data = data[:len(data):len(data)]
	m.Body = &pb.ServerMessage_Outcome{Outcome: o}
	return nil
}

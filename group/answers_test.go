package group

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/symmem/symmem/group/internal/pb"
)

// answers are messages of the service, and others that are none.
func answers(t testing.TB) (all [][]byte) {
	t.Helper()
	for _, m := range []*pb.ServerMessage{
		{}, {Body: &pb.ServerMessage_Welcome{Welcome: &pb.Welcome{Kept: true}}}, {Body: &pb.ServerMessage_Outcome{Outcome: &pb.Outcome{}}},
		{Body: &pb.ServerMessage_Outcome{Outcome: &pb.Outcome{Group: "g", Sequence: 7, Data: []byte("three"), Sizes: []uint32{1, 4}, More: true}}},
		{Body: &pb.ServerMessage_Outcome{Outcome: &pb.Outcome{Group: "g", Failure: &pb.Failure{Kind: 2, Values: []string{"a", "b"}}}}},
		{Body: &pb.ServerMessage_Store{Store: &pb.StoreReply{Id: 3}}},
	} {
		b, err := proto.Marshal(m)
		require.NoError(t, err)
		all = append(all, b)
	}
	field := func(number protowire.Number, body []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), body)
	}
	twice := append(field(dataField, []byte("first")), field(dataField, []byte("last"))...)
	number := protowire.AppendVarint(protowire.AppendTag(nil, dataField, protowire.VarintType), 5)
	return append(all, field(outcomeField, twice), field(outcomeField, number), field(outcomeField, field(1, []byte{0xff})), field(outcomeField, field(99, []byte("new"))),
		append(field(outcomeField, twice), field(outcomeField, field(1, []byte("g")))...), field(outcomeField, twice[:3]), field(outcomeField, twice)[:5],
		append(field(outcomeField, twice), 0xff), []byte{0xff})
}

// sameAnswer wants what the protobuf library makes of a message.
func sameAnswer(t testing.TB, b []byte) {
	t.Helper()
	var want, got pb.ServerMessage
	wantErr, err := proto.Unmarshal(b, &want), readAnswer(bytes.Clone(b), &got)
	require.Equal(t, wantErr == nil, err == nil, "%x: %v, and protobuf says %v", b, err, wantErr)
	if err == nil {
		require.True(t, proto.Equal(&want, &got), "%x: %v, and protobuf says %v", b, &got, &want)
	}
}

// TestAnswers: messages are read as protobuf reads them, but the blobs of an outcome stay where they are.
func TestAnswers(t *testing.T) {
	for _, b := range answers(t) {
		sameAnswer(t, b)
	}
	b, err := proto.Marshal(&pb.ServerMessage{Body: &pb.ServerMessage_Outcome{Outcome: &pb.Outcome{Group: "g", Data: []byte("blobs"), Sizes: []uint32{5}}}})
	require.NoError(t, err)
	var m pb.ServerMessage
	require.NoError(t, readAnswer(b, &m))
	b[bytes.Index(b, []byte("blobs"))] = 'B'
	assert.Equal(t, "Blobs", string(m.GetOutcome().GetData()))
	assert.Equal(t, 5, cap(m.GetOutcome().GetData()), "appending to it leaves the rest of the message alone")
	fields := (&pb.ServerMessage{}).ProtoReflect().Descriptor().Fields()
	assert.EqualValues(t, outcomeField, fields.ByName("outcome").Number())
	assert.EqualValues(t, dataField, (&pb.Outcome{}).ProtoReflect().Descriptor().Fields().ByName("data").Number())
}

// FuzzAnswers: and so is what no service sends.
func FuzzAnswers(f *testing.F) {
	for _, b := range answers(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) { sameAnswer(t, b) })
}

package group

import (
	"fmt"
	"sync"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/symmem/symmem/group/internal/pb"
)

// frameBytes is how many bytes of blobs go into one message of an outcome; a single blob is never split.
const frameBytes = 4 << 20

// maxServerMessage bounds what a rank receives in one message: a frame of blobs, or the texts of all ranks of a large world.
const maxServerMessage = 160 << 20

// maxClientMessage bounds what the service receives in one message: a compare-and-swap carries two values.
const maxClientMessage = 2*MaxBlob + 1<<20

// frameCache keeps an outcome's form on the wire. An all-gather's outcome is the same for every rank, and encoding it once
// instead of once a rank is what keeps a large world fast.
type frameCache struct {
	once   sync.Once
	frames []rawFrame
	err    error
}

// rawFrame is an encoded ServerMessage. It is not changed any more.
type rawFrame []byte

// frameCodec is the protobuf codec, except that it passes raw frames through.
type frameCodec struct{ encoding.CodecV2 }

func newFrameCodec() frameCodec { return frameCodec{encoding.GetCodecV2("proto")} }

// Marshal gives the wire form of a raw frame or a protobuf message.
func (c frameCodec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(rawFrame); ok {
		return mem.BufferSlice{mem.SliceBuffer(f)}, nil
	}
	return c.CodecV2.Marshal(v)
}

func encodeFrame(m *pb.ServerMessage) (rawFrame, error) {
	frame, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding a message: %w", err)
	}
	return frame, nil
}

// encoded gives the messages that carry the outcome of one round.
func (o *outcome) encoded(group string, seq uint64) ([]rawFrame, error) {
	o.frames.once.Do(func() {
		for rest := o.blobs; ; {
			n, size := 0, 0
			for n < len(rest) && (n == 0 || size+len(rest[n]) <= frameBytes) {
				size += len(rest[n])
				n++
			}
			message := &pb.Outcome{
				Group: group, Sequence: seq, Failure: o.failure.toWire(),
				Data: make([]byte, 0, size), Sizes: make([]uint32, 0, n), More: n < len(rest),
			}
			for _, blob := range rest[:n] {
				message.Data = append(message.Data, blob...)
				message.Sizes = append(message.Sizes, uint32(len(blob)))
			}
			rest = rest[n:]
			frame, err := encodeFrame(&pb.ServerMessage{Body: &pb.ServerMessage_Outcome{Outcome: message}})
			if err != nil {
				o.frames.frames, o.frames.err = nil, err
				return
			}
			o.frames.frames = append(o.frames.frames, frame)
			if !message.More {
				return
			}
		}
	})
	return o.frames.frames, o.frames.err
}

// splitBlobs gives the blobs of one message, each with its own capacity so that appending to one leaves the next alone.
func splitBlobs(m *pb.Outcome) ([][]byte, error) {
	data := m.GetData()
	blobs := make([][]byte, len(m.GetSizes()))
	for i, size := range m.GetSizes() {
		if uint64(size) > uint64(len(data)) {
			return nil, fmt.Errorf("blob %d of a message has %d bytes and only %d are there", i, size, len(data))
		}
		blobs[i], data = data[:size:size], data[size:]
	}
	if len(data) > 0 {
		return nil, fmt.Errorf("%d bytes of a message belong to no blob", len(data))
	}
	return blobs, nil
}

func (f *failure) toWire() *pb.Failure {
	if f == nil {
		return nil
	}
	w := &pb.Failure{
		Kind: uint32(f.kind), Rank: int64(f.rank), Text: f.text, Missing: toInt64s(f.missing), Values: f.values, Lost: f.lost.toWire(),
	}
	for _, one := range f.failures {
		w.Failures = append(w.Failures, &pb.RankFailure{Rank: int64(one.Rank), Text: one.Text})
	}
	return w
}

func failureFromWire(w *pb.Failure) *failure {
	if w == nil {
		return nil
	}
	f := &failure{
		kind: failureKind(w.Kind), rank: int(w.Rank), text: w.Text, missing: toInts(w.Missing), values: w.Values,
		lost: lossFromWire(w.Lost),
	}
	if f.kind == failLost && f.lost == nil {
		f.lost = &loss{worldRank: -1, reason: "the service did not say which"}
	}
	for _, one := range w.Failures {
		f.failures = append(f.failures, RankFailure{Rank: int(one.GetRank()), Text: one.GetText()})
	}
	return f
}

func (l *loss) toWire() *pb.Loss {
	if l == nil {
		return nil
	}
	return &pb.Loss{WorldRank: int64(l.worldRank), Host: l.host, Pid: int64(l.pid), Reason: l.reason, Groups: l.groups}
}

func lossFromWire(w *pb.Loss) *loss {
	if w == nil {
		return nil
	}
	return &loss{worldRank: int(w.WorldRank), host: w.Host, pid: int(w.Pid), reason: w.Reason, groups: w.Groups}
}

func (m Member) toWire() *pb.Member {
	return &pb.Member{
		WorldRank: int64(m.WorldRank), Host: clip(m.Host), Pid: int64(m.PID), BootId: m.BootID, Process: m.Process,
		LocalRank: int64(m.LocalRank),
	}
}

func memberFromWire(w *pb.Member) Member {
	return Member{
		WorldRank: int(w.GetWorldRank()), Host: w.GetHost(), PID: int(w.GetPid()), BootID: w.GetBootId(), Process: w.GetProcess(),
		LocalRank: int(w.GetLocalRank()),
	}
}

func toInt64s(s []int) []int64 {
	r := make([]int64, len(s))
	for i, v := range s {
		r[i] = int64(v)
	}
	return r
}

// toInts never gives nil: an empty list that was sent is still a list.
func toInts(s []int64) []int {
	r := make([]int, len(s))
	for i, v := range s {
		r[i] = int(v)
	}
	return r
}

// outbox is a queue of messages with one sender that drains it. It never blocks whoever puts: the hub does so with its lock
// held. What can pile up is bounded by the requests that the rank at the other end has under way.
type outbox struct {
	mu     sync.Mutex
	queued []any
	wake   chan struct{} // holds one token while something is queued
}

func newOutbox() *outbox { return &outbox{wake: make(chan struct{}, 1)} }

func (o *outbox) put(messages ...any) {
	o.mu.Lock()
	o.queued = append(o.queued, messages...)
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (o *outbox) take() []any {
	o.mu.Lock()
	defer o.mu.Unlock()
	queued := o.queued
	o.queued = nil
	return queued
}

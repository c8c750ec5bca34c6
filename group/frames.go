package group

import (
	"fmt"
	"sync"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/processors"
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

// rawFrame is an encoded ServerMessage. It is immutable.
type rawFrame []byte

// frameCodec is the protobuf codec, except that it passes raw frames through.
type frameCodec struct{ encoding.CodecV2 }

func newFrameCodec() frameCodec { return frameCodec{encoding.GetCodecV2("proto")} }

// Marshal returns the wire form of a raw frame or a protobuf message.
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

// encoded returns the messages that carry the outcome of one round.
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

// splitBlobs returns the blobs of one message, each with its own capacity so that appending to one leaves the next alone.
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
		Limit: f.limit,
	}
	for _, one := range f.failures {
		w.Failures = append(w.Failures, &pb.RankFailure{Rank: int64(one.rank), Text: one.text, Conditions: one.conditions})
	}
	return w
}

func failureFromWire(w *pb.Failure) *failure {
	if w == nil {
		return nil
	}
	f := &failure{
		kind: failureKind(w.Kind), rank: int(w.Rank), text: w.Text, missing: toInts(w.Missing), values: w.Values,
		lost: lossFromWire(w.Lost), limit: w.Limit,
	}
	if f.kind == failLost && f.lost == nil {
		f.lost = &loss{worldRank: -1, reason: "the service did not say which"}
	}
	for _, one := range w.Failures {
		f.failures = append(f.failures, rankFailure{int(one.GetRank()), one.GetText(), one.GetConditions()})
	}
	return f
}

func (l *loss) toWire() *pb.Loss {
	if l == nil {
		return nil
	}
	return &pb.Loss{WorldRank: int64(l.worldRank), Host: l.host, Pid: int64(l.pid), Reason: l.reason, Groups: l.groups}
}

// encoded returns the message that tells a rank of the loss, the same for all.
func (l *loss) encoded() (rawFrame, error) {
	l.frame.once.Do(func() {
		var frame rawFrame
		frame, l.frame.err = encodeFrame(&pb.ServerMessage{Body: &pb.ServerMessage_Loss{Loss: l.toWire()}})
		l.frame.frames = []rawFrame{frame}
	})
	return l.frame.frames[0], l.frame.err
}

func lossFromWire(w *pb.Loss) *loss {
	if w == nil {
		return nil
	}
	return &loss{worldRank: int(w.WorldRank), host: w.Host, pid: int(w.Pid), reason: w.Reason, groups: w.Groups}
}

func (m Member) toWire() *pb.Member {
	return &pb.Member{
		WorldRank: int64(m.WorldRank), Host: clip(m.Host), Pid: int64(m.PID), BootId: clip(m.BootID), Process: m.Process,
		LocalRank: int64(m.LocalRank), Processors: []byte(m.share.Set), AtOnce: int64(m.share.AtOnce), Quota: m.share.Quota, QuotaOf: m.share.QuotaOf,
	}
}

func memberFromWire(w *pb.Member) Member {
	return Member{
		WorldRank: int(w.GetWorldRank()), Host: w.GetHost(), PID: int(w.GetPid()), BootID: w.GetBootId(), Process: w.GetProcess(),
		LocalRank: int(w.GetLocalRank()),
		share: processors.Share{
			Set: processors.Set(w.GetProcessors()), AtOnce: int(w.GetAtOnce()), Quota: w.GetQuota(), QuotaOf: w.GetQuotaOf(),
		}.Checked(),
	}
}

func toInt64s(s []int) []int64 {
	r := make([]int64, len(s))
	for i, v := range s {
		r[i] = int64(v)
	}
	return r
}

// toInts converts a list. It never returns nil, since a list that was sent empty is still a list.
func toInts(s []int64) []int {
	r := make([]int, len(s))
	for i, v := range s {
		r[i] = int(v)
	}
	return r
}

// outbox is a queue of messages with one sender that drains it. Putting never blocks, since the hub puts with its lock held. What can pile up is
// bounded by the requests that the rank at the other end has under way, of which no more are read while the outbox is full.
type outbox struct {
	most   int // messages, and bytes, with which it is full
	large  int64
	mu     sync.Mutex
	queued []queuedMessage
	count  int           // messages that are not sent yet
	bytes  int64         // of them
	wake   chan struct{} // holds one token while something is queued
	room   chan struct{} // holds one token after the outbox was full
}

// queuedMessage is a message and about how many bytes it has.
type queuedMessage struct {
	message any
	size    int64
}

func newOutbox(most int, large int64) *outbox {
	return &outbox{most: most, large: large, wake: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

func (o *outbox) put(messages ...any) {
	queued := make([]queuedMessage, len(messages))
	for i, m := range messages {
		queued[i] = queuedMessage{message: m, size: messageSize(m)}
	}
	o.mu.Lock()
	o.add(queued...)
	o.mu.Unlock()
	signal(o.wake)
}

// add queues messages. The caller holds the lock.
func (o *outbox) add(queued ...queuedMessage) {
	for _, q := range queued {
		o.count++
		o.bytes += q.size
	}
	o.queued = append(o.queued, queued...)
}

// offer puts a message unless the outbox is full, and reports whether it has: callers that come at the same time do not all find room that is for one.
func (o *outbox) offer(message any) bool {
	q := queuedMessage{message: message, size: messageSize(message)}
	o.mu.Lock()
	full := o.fullLocked()
	if !full {
		o.add(q)
	}
	o.mu.Unlock()
	if !full {
		signal(o.wake)
	}
	return !full
}

// reset puts messages in place of all that is queued or under way.
func (o *outbox) reset(messages []any) {
	o.mu.Lock()
	o.queued, o.count, o.bytes = nil, 0, 0
	o.mu.Unlock()
	signal(o.room)
	o.put(messages...)
}

func (o *outbox) take() []queuedMessage {
	o.mu.Lock()
	defer o.mu.Unlock()
	queued := o.queued
	o.queued = nil
	return queued
}

// sent notes that a message that was taken has been sent.
func (o *outbox) sent(q queuedMessage) {
	o.mu.Lock()
	full := o.fullLocked()
	o.count--
	o.bytes -= q.size
	room := full && !o.fullLocked()
	o.mu.Unlock()
	if room {
		signal(o.room)
	}
}

// empty reports whether all messages have been sent.
func (o *outbox) empty() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.count == 0
}

func (o *outbox) full() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.fullLocked()
}

// crowded reports whether the outbox is full because of the number of its messages.
func (o *outbox) crowded() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.count >= o.most
}

func (o *outbox) fullLocked() bool { return o.count >= o.most || o.bytes >= o.large }

// signal puts a token into a channel that has room for one, unless there is one already.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func messageSize(m any) int64 {
	switch m := m.(type) {
	case pendingOutcome:
		size := 0
		for _, blob := range m.outcome.blobs {
			size += len(blob)
		}
		return int64(size)
	case rawFrame:
		return int64(len(m))
	case proto.Message:
		return int64(proto.Size(m))
	}
	return 0
}

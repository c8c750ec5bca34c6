package group

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/symmem/symmem/group/internal/pb"
)

// recorder is one rank's arrival and what came of it.
type recorder struct {
	t     *rapid.T
	rank  int
	seq   uint64
	got   *outcome
	times int
}

func (r *recorder) receiveOutcome(_ string, seq uint64, o *outcome) {
	r.times++
	r.got = o
	if r.times > 1 || seq != r.seq {
		r.t.Fatalf("rank %d, call %d: outcome %d of call %d", r.rank, r.seq, r.times, seq)
	}
}

// newsReader counts the losses that a rank is told of.
type newsReader struct{ losses map[int]int }

func (n *newsReader) receiveLoss(l *loss) { n.losses[l.worldRank]++ }

// TestHubModel does what ranks do in any order, and checks what must hold whatever they do: everyone who waits is answered
// exactly once when everyone else has come, has left, is lost or the call was given up; answers to one call are alike; and the
// hub remembers nothing of what is over.
func TestHubModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 5).Draw(t, "ranks")
		h := newHub(n, &defaultLimits)
		news := make([]*newsReader, n)
		for rank := range n {
			news[rank] = &newsReader{losses: map[int]int{}}
			_, ok := h.attach(Member{WorldRank: rank}, news[rank])
			require.True(t, ok)
			_, ok = h.attach(Member{WorldRank: rank}, news[rank])
			require.False(t, ok)
		}
		next := make([]uint64, n)
		gone, lost := make([]bool, n), make([]bool, n)
		bySeq := map[uint64][]*recorder{}
		kinds := []kind{kindBarrier, kindBarrier, kindBarrier, kindAllGather, kindVote}
		t.Repeat(map[string]func(*rapid.T){
			"arrive": func(t *rapid.T) {
				rank := rapid.IntRange(0, n-1).Draw(t, "rank")
				r := &recorder{t: t, rank: rank, seq: next[rank]}
				next[rank]++
				bySeq[r.seq] = append(bySeq[r.seq], r)
				h.arrive(rank, worldName, r.seq, &arrival{
					kind: rapid.SampledFrom(kinds).Draw(t, "kind"), data: []byte{byte(rank)},
					refused: rapid.IntRange(0, 9).Draw(t, "refused") == 0, to: r,
				})
				if gone[rank] && r.got == nil {
					t.Fatalf("rank %d is gone and waits", rank)
				}
			},
			"abandon": func(t *rapid.T) {
				rank := rapid.IntRange(0, n-1).Draw(t, "rank")
				seq := rapid.Uint64Range(0, next[rank]).Draw(t, "seq")
				h.abandon(rank, worldName, seq, "test")
				for _, r := range bySeq[seq] {
					if r.rank == rank && r.got == nil && !gone[rank] {
						t.Fatalf("rank %d gave up call %d and is not told", rank, seq)
					}
				}
			},
			"store": func(t *rapid.T) {
				verbs := []verb{verbSet, verbGet, verbGet, verbAdd, verbCompareAndSwap, verbDelete}
				h.request(rapid.IntRange(0, n-1).Draw(t, "rank"), worldName, &storeRequest{
					verb: rapid.SampledFrom(verbs).Draw(t, "verb"), key: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "key"),
					value: make([]byte, rapid.IntRange(0, 5).Draw(t, "size")), replyTo: make(replyChan, 1),
				})
			},
			"sub": func(t *rapid.T) {
				name := fmt.Sprint("sub", rapid.IntRange(0, 3).Draw(t, "group"))
				members := []int{0, n - 1}
				if n == 1 {
					members = members[:1]
				}
				for _, rank := range members {
					switch rapid.IntRange(0, 3).Draw(t, "do") {
					case 0:
						h.arrive(rank, name, 0, &arrival{kind: kindSub, members: members, to: make(outcomeChan, 1)})
					case 1:
						h.abandon(rank, name, 0, "test")
					case 2:
						h.leaveGroup(rank, name)
					}
				}
			},
			"leave": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "seldom") > 0 {
					return
				}
				rank := rapid.IntRange(0, n-1).Draw(t, "rank")
				h.leave(rank)
				gone[rank] = true
			},
			"lose": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "seldom") > 0 {
					return
				}
				rank := rapid.IntRange(0, n-1).Draw(t, "rank")
				h.lose(rank, "test")
				if !gone[rank] {
					gone[rank], lost[rank] = true, true
				}
			},
			"": func(t *rapid.T) {
				anyLost := false
				for _, l := range lost {
					anyLost = anyLost || l
				}
				for seq, recorders := range bySeq {
					success := false
					for _, r := range recorders {
						success = success || r.got != nil && r.got.failure == nil
						if r.got == nil && !gone[r.rank] && (anyLost || len(recorders) == n) {
							t.Fatalf("rank %d waits in call %d for nobody", r.rank, seq)
						}
					}
					for _, r := range recorders {
						if success && (len(recorders) != n || r.got != recorders[0].got) {
							t.Fatalf("call %d succeeded for some", seq)
						}
					}
				}
				if g := h.groups[worldName]; g != nil {
					if len(g.failed) > maxTombstones {
						t.Fatalf("%d failures are remembered", len(g.failed))
					}
					for seq, r := range g.rounds {
						if r.came >= n {
							t.Fatalf("call %d is over and remembered", seq)
						}
					}
				}
			},
		})
		for rank := range n {
			for other, times := range news[rank].losses {
				require.LessOrEqual(t, times, 1)
				require.True(t, lost[other])
			}
		}
		for rank := range n {
			h.leave(rank)
		}
		require.Empty(t, h.groups)
		require.Empty(t, h.attached())
		for rank := range n { // no quota is used up for ever
			require.Zero(t, h.ranks[rank].calls)
			require.Zero(t, h.ranks[rank].callBytes)
			require.Zero(t, h.ranks[rank].gets)
			require.Zero(t, h.ranks[rank].opened)
		}
		require.Zero(t, h.keys)
		require.Zero(t, h.storeBytes)
		<-h.gone()
	})
}

// TestHubBadRequests sends what no rank of this package sends.
func TestHubBadRequests(t *testing.T) {
	h := newHub(3, &defaultLimits)
	for rank := range 2 {
		h.attach(Member{WorldRank: rank}, &newsReader{losses: map[int]int{}})
	}
	ask := func(rank int, group string, a *arrival) *failure {
		result := make(outcomeChan, 1)
		a.to = result
		h.arrive(rank, group, 0, a)
		select {
		case o := <-result:
			return o.failure
		default:
			return nil
		}
	}
	require.Equal(t, failClosed, ask(0, "none", &arrival{kind: kindBarrier}).kind)
	require.Equal(t, failClosed, ask(0, "s", &arrival{kind: kindSub, members: []int{0, 7}}).kind)
	require.Equal(t, failClosed, ask(0, "s", &arrival{kind: kindSub, members: []int{1, 0}}).kind)
	require.Nil(t, ask(0, "s", &arrival{kind: kindSub, members: []int{0, 1}}))
	require.Equal(t, failInvalid, ask(1, "s", &arrival{kind: kindSub, members: []int{0, 1, 2}}).kind)
	require.Equal(t, failInvalid, ask(2, "s", &arrival{kind: kindBarrier}).kind)
	require.Nil(t, ask(0, worldName, &arrival{kind: kindBarrier}))
	require.Equal(t, failInvalid, ask(0, worldName, &arrival{kind: kindBarrier}).kind, "twice in one call")
	reply := make(replyChan, 1)
	h.request(0, worldName, &storeRequest{verb: 99, replyTo: reply})
	require.Equal(t, failInvalid, (<-reply).failure.kind)
	h.abandon(2, worldName, 0, "")
	h.abandon(0, "none", 0, "")
	h.cancelGet(0, "none", "", 0)
	h.leaveGroup(2, "s")
	h.leaveGroup(0, "none")
	h.lose(2, "it was never there")
	h.leave(2)
	require.Equal(t, []int{0, 1}, h.attached())
}

func TestFrames(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := &outcome{blobs: make([][]byte, rapid.IntRange(0, 20).Draw(t, "blobs"))}
		large := rapid.IntRange(0, 40).Draw(t, "large") == 0
		for i := range o.blobs {
			size := rapid.IntRange(0, 100).Draw(t, "size")
			if large {
				size *= frameBytes / 80
			}
			o.blobs[i] = bytes.Repeat([]byte{byte(i)}, size)
		}
		frames, err := o.encoded("g", 7)
		require.NoError(t, err)
		var blobs [][]byte
		for i, frame := range frames {
			var m pb.ServerMessage
			require.NoError(t, proto.Unmarshal(frame, &m))
			require.Equal(t, i < len(frames)-1, m.GetOutcome().GetMore())
			part, err := splitBlobs(m.GetOutcome())
			require.NoError(t, err)
			blobs = append(blobs, part...)
		}
		require.Len(t, blobs, len(o.blobs))
		for i := range blobs {
			require.True(t, bytes.Equal(blobs[i], o.blobs[i]))
		}
	})
	for _, bad := range []*pb.Outcome{{Sizes: []uint32{1}}, {Data: []byte{1}}, {Data: []byte{1}, Sizes: []uint32{1 << 31, 1 << 31}}} {
		_, err := splitBlobs(bad)
		require.Error(t, err)
	}
	f := &failure{kind: failLost, rank: 1, text: "t", missing: []int{2}, values: []string{"v"}, failures: []rankFailure{{3, "x", []uint32{1, 1 << 31}}},
		lost: &loss{worldRank: 4, host: "h", pid: 5, reason: "r", groups: []string{"g"}}}
	require.Equal(t, f, failureFromWire(f.toWire()))
	require.Nil(t, failureFromWire((*failure)(nil).toWire()))
}

// TestStandingIsOfOneMoment: a rank that comes while the service looks whether the job is over is seen, as absent or as present. A job of which no rank was either
// would be over.
func TestStandingIsOfOneMoment(t *testing.T) {
	const n = 256
	for range 20 {
		h := newHub(n, &defaultLimits)
		var coming sync.WaitGroup
		coming.Go(func() {
			for rank := range n {
				h.attach(Member{WorldRank: rank}, nil)
				runtime.Gosched()
			}
		})
		for here := 0; here < n; runtime.Gosched() {
			present, absent := h.standing()
			if here = len(present); here+len(absent) != n {
				t.Fatalf("%d ranks are present and %d absent, of %d", here, len(absent), n)
			}
		}
		coming.Wait()
	}
}

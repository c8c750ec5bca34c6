package group

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/symmem/symmem/group/internal/pb"
)

// TestClocksDiffer: the clocks of hosts may say what they like. One of two ranks lives in a bubble of package synctest, where it is the year 2000 and stays so,
// once as the rank that serves the rendezvous and once as the other one. Nobody looks at the validity of certificates that the service makes itself, either.
func TestClocksDiffer(t *testing.T) {
	for _, token := range []string{"", "secret"} {
		for old := range 2 {
			t.Run(fmt.Sprintf("rank %d, token %q", old, token), func(t *testing.T) {
				ctx, now := testContext(t), time.Now().Round(0)
				l := listenLoopback(t)
				options := func(rank int) *Options {
					o := &Options{Rank: rank, WorldSize: 2, Addr: l.Addr().String(), Token: token, LivenessTimeout: time.Minute, Timeout: time.Minute}
					if rank == 0 {
						o.Listener = l
					}
					return o
				}
				failures := make([]error, 2)
				var wait sync.WaitGroup
				wait.Go(func() { failures[1-old] = meetAndLeave(ctx, options(1-old)) })
				synctest.Test(t, func(t *testing.T) {
					assert.Greater(t, time.Until(now), 24*time.Hour)
					failures[old] = meetAndLeave(t.Context(), options(old))
				})
				wait.Wait()
				requireNone(t, failures)
			})
		}
	}
}

// meetAndLeave makes every kind of call once.
func meetAndLeave(ctx context.Context, o *Options) error {
	g, err := Join(ctx, o)
	if err != nil {
		return err
	}
	blobs, err := g.AllGather(ctx, "gather", []byte{byte(o.Rank)})
	if err == nil && (len(blobs) != 2 || blobs[1][0] != 1) {
		err = fmt.Errorf("the blobs are %v", blobs)
	}
	if err == nil {
		err = g.Vote(ctx, "vote", nil)
	}
	if err == nil && o.Rank == 0 {
		err = g.Store().Set(ctx, "key", []byte("value"))
	}
	if err == nil {
		_, err = g.Store().Get(ctx, "key") // which the other one may have to wait for
	}
	if err == nil {
		var s *Group
		if s, err = g.Sub(ctx, []int{0, 1}); err == nil {
			err = errors.Join(s.Barrier(ctx, "sub"), s.Close(ctx))
		}
	}
	if err == nil {
		err = g.Barrier(ctx, "leaving")
	}
	return errors.Join(err, g.Close(ctx))
}

// TestNoTimeOnTheWire: no message of the protocol, and nothing that a store keeps, has a moment in it: its numbers are known here, and none is one. A
// connection's only moments are those of certificates, which count where the program brings its own (Options.TLS).
func TestNoTimeOnTheWire(t *testing.T) {
	known := []protoreflect.FullName{
		"Hello.restart", "Hello.world_size", "Hello.liveness", "Welcome.liveness", "Member.world_rank", "Member.pid", "Member.local_rank", "Member.at_once", "Member.quota", "Member.quota_of",
		"Refusal.reason", "Arrival.sequence", "Arrival.kind", "Arrival.root", "Arrival.members", "Arrival.conditions", "Arrival.excuse_conditions", "Abandon.sequence", "Outcome.sequence", "Outcome.sizes",
		"Failure.kind", "Failure.rank", "Failure.missing", "Failure.limit", "RankFailure.rank", "RankFailure.conditions", "Loss.world_rank", "Loss.pid",
		"StoreRequest.id", "StoreRequest.verb", "StoreRequest.delta", "StoreReply.id", "StoreReply.number", "CancelGet.id", "Taken.sequence", "Taken.request",
		"KeptRank.state", "KeptRank.order", "KeptGroup.opener", "KeptGroup.members", "KeptGroup.buried",
	}
	var visit func(protoreflect.MessageDescriptors)
	visit = func(messages protoreflect.MessageDescriptors) {
		for i := range messages.Len() {
			m := messages.Get(i)
			visit(m.Messages())
			for j := range m.Fields().Len() {
				switch f := m.Fields().Get(j); f.Kind() {
				case protoreflect.BoolKind, protoreflect.StringKind, protoreflect.BytesKind:
				case protoreflect.MessageKind:
					assert.Equal(t, pb.File_rendezvous_proto.Package(), f.Message().ParentFile().Package(), "%s", f.FullName()) // as a Timestamp is not
				default:
					assert.Contains(t, known, protoreflect.FullName(m.Name()).Append(f.Name()), "%s", f.FullName())
				}
			}
		}
	}
	visit(pb.File_rendezvous_proto.Messages())
}

package group

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/symmem/symmem/group/durable"
)

// wholeMessages is a codec that leaves messages as they are.
type wholeMessages struct{}

func (wholeMessages) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (wholeMessages) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte{}, data...)
	return nil
}
func (wholeMessages) Name() string { return "proto" }

// messageStream is either end of a stream.
type messageStream interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

// inFrontOf returns the URL of something that passes on to a server of etcd what refuse does not refuse.
func inFrontOf(t *testing.T, store string, refuse func(method string) error) string {
	t.Helper()
	u, err := url.Parse(store)
	require.NoError(t, err)
	conn, err := grpc.NewClient(u.Host, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(wholeMessages{})))
	require.NoError(t, err)
	pass := func(from, to messageStream) error {
		for {
			var m []byte
			if err := from.RecvMsg(&m); err != nil {
				return err
			}
			if err := to.SendMsg(&m); err != nil {
				return err
			}
		}
	}
	server := grpc.NewServer(grpc.ForceServerCodec(wholeMessages{}), grpc.WaitForHandlers(true), grpc.UnknownServiceHandler(func(_ any, near grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(near)
		if err := refuse(method); err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(near.Context())
		defer cancel()
		far, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
		if err != nil {
			return err
		}
		go func() {
			if errors.Is(pass(near, far), io.EOF) {
				_ = far.CloseSend()
			}
		}()
		if err := pass(far, near); !errors.Is(err, io.EOF) {
			return err
		}
		return nil
	}))
	l := listenLoopback(t)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close())
	})
	u.Host = l.Addr().String()
	return u.String()
}

// TestEtcdRefusesForAMoment: what etcd refuses for a moment only, as it has too many requests or was compacted while it was read, is tried again.
func TestEtcdRefusesForAMoment(t *testing.T) {
	t.Parallel() // it waits, most of the time
	for name, tt := range map[string]struct {
		method string
		err    error
	}{
		"too many requests to change": {"/Txn", rpctypes.ErrGRPCRequestTooManyRequests},
		"too many requests to read":   {"/Range", rpctypes.ErrGRPCRequestTooManyRequests},
		"compacted":                   {"/Range", rpctypes.ErrGRPCCompacted},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := testContext(t)
			var left atomic.Int32
			store := openStore(t, inFrontOf(t, etcdURL(t), func(method string) error {
				if strings.HasSuffix(method, tt.method) && left.Add(-1) >= 0 {
					return tt.err
				}
				return nil
			}), uniqueJob(), time.Minute)
			left.Store(2)
			want := map[string][]byte{}
			for i := range 100 { // more than are read at a time
				key := fmt.Sprint("k", i)
				want[key] = []byte(key)
				require.NoError(t, store.Commit(ctx, [][]durable.Change{{{Key: key, Value: want[key]}}}))
			}
			kept, err := store.Load(ctx)
			require.NoError(t, err)
			require.Equal(t, want, kept)
			require.Negative(t, left.Load())
		})
	}
	ctx, cancel := context.WithTimeout(testContext(t), time.Second)
	defer cancel()
	_, err := durable.Open(ctx, inFrontOf(t, etcdURL(t), func(string) error { return rpctypes.ErrGRPCRequestTooManyRequests }), durable.Options{Name: uniqueJob(), TTL: time.Minute})
	requireCondition(t, err, durable.Unreachable)
}

// TestEtcdReadsSlowly: a state that takes longer to read than one attempt of a request may take is read.
func TestEtcdReadsSlowly(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	var slow atomic.Bool
	store := openStore(t, inFrontOf(t, etcdURL(t), func(method string) error {
		if slow.Load() && strings.HasSuffix(method, "/Range") {
			time.Sleep(1100 * time.Millisecond)
		}
		return nil
	}), uniqueJob(), time.Minute)
	want := map[string][]byte{}
	var changes [][]durable.Change
	for i := range 150 { // more than are read in two requests
		key := fmt.Sprint("k", i)
		want[key] = []byte(key)
		changes = append(changes, []durable.Change{{Key: key, Value: want[key]}})
	}
	require.NoError(t, store.Commit(ctx, changes))
	slow.Store(true)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	kept, err := store.Load(ctx)
	require.NoError(t, err)
	require.Equal(t, want, kept)
}

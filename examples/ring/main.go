// Ring passes a token from rank to rank by put, signal and wait, without any call of the rank that receives it but the wait:
//
//	go run ./cmd/symmem run -n 4 -- go run ./examples/ring
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/symmem/symmem"
	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/tensor"
)

const rounds = 3

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	cfg, err := config.Load(nil)
	if err == nil {
		err = start(ctx, cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "ring:", err)
		os.Exit(1)
	}
}

func start(ctx context.Context, cfg config.Config) error {
	r, err := symmem.Open(ctx, cfg, nil)
	if err != nil {
		return err
	}
	return errors.Join(run(ctx, r), r.Close(ctx))
}

func run(ctx context.Context, r *symmem.Rank) error {
	const channel = 0
	next, prev := (r.Rank()+1)%r.WorldSize(), (r.Rank()+r.WorldSize()-1)%r.WorldSize()
	inbox, err := r.Zeros(ctx, tensor.Int64, 1) // where the token arrives
	if err != nil {
		return err
	}
	outbox, err := r.Zeros(ctx, tensor.Int64, 1) // where it is sent from
	if err != nil {
		return err
	}
	if err := inbox.Rendezvous(ctx); err != nil {
		return err
	}
	stream, err := r.NewStream()
	if err != nil {
		return err
	}
	send := func(token int64) error {
		if err := tensor.Write(outbox.Local(), []int64{token}, 0); err != nil {
			return err
		}
		// First the put, then the signal: whoever has waited for the signal sees the token.
		return errors.Join(inbox.Put(stream, next, outbox), inbox.Signal(stream, next, channel), stream.Synchronize(ctx))
	}
	receive := func() (int64, error) {
		if err := errors.Join(inbox.Wait(stream, prev, channel), stream.Synchronize(ctx)); err != nil {
			return 0, err
		}
		var token [1]int64
		err := tensor.Read(inbox.Local(), token[:], 0)
		return token[0], err
	}
	for round := range rounds {
		if r.Rank() == 0 {
			if err := send(int64(100 * round)); err != nil {
				return err
			}
		}
		token, err := receive()
		if err != nil {
			return err
		}
		fmt.Printf("round %d: rank %d got %d from rank %d\n", round, r.Rank(), token, prev)
		if r.Rank() != 0 {
			if err := send(token + 1); err != nil {
				return err
			}
		}
	}
	return errors.Join(stream.Close(), outbox.Close(ctx), inbox.Close(ctx))
}

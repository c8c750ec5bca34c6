package group

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// runExiting is rank 0 of a world that votes, fails with all the others, and exits at once, as a program does that ends with log.Fatal.
func runExiting() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	ctx := context.Background()
	g, err := Join(ctx, &Options{WorldSize: exitingWorld, Listener: l, Addr: l.Addr().String(), Token: os.Getenv("SYMMEM_TEST_GROUP_TOKEN")})
	if err != nil {
		return err
	}
	if err := g.Vote(ctx, "agreeing", nil); !errors.Is(err, ErrInvalid) {
		return fmt.Errorf("the vote ended with %v", err)
	}
	os.Exit(0)
	return nil
}

// exitingWorld is how many ranks there are with the one that exits.
const exitingWorld = 4

// TestAgreedFailureOutlivesRank0: what the ranks have agreed on reaches all of them, also when rank 0, which serves the rendezvous, exits as soon
// as it knows.
func TestAgreedFailureOutlivesRank0(t *testing.T) {
	for i := range 20 {
		token := []string{"", longToken}[i%2] // without and with TLS
		cmd := exec.CommandContext(testContext(t), os.Args[0])
		cmd.Env = append(os.Environ(), "SYMMEM_TEST_GROUP_WORKER=exiting", "SYMMEM_TEST_GROUP_TOKEN="+token)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		addr, err := bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err, &stderr)
		errs := make([]error, exitingWorld)
		done := make(chan struct{})
		for rank := 1; rank < exitingWorld; rank++ {
			go func() {
				defer func() { done <- struct{}{} }()
				g, err := Join(testContext(t), &Options{Rank: rank, WorldSize: exitingWorld, Addr: strings.TrimSpace(addr), Token: token})
				if err != nil {
					errs[rank] = err
					return
				}
				var failure error
				if rank == 1 {
					failure = fmt.Errorf("this rank has failed: %w", ErrInvalid)
				}
				errs[rank] = g.Vote(testContext(t), "agreeing", failure)
				_ = g.Close(testContext(t)) // rank 0 may have gone
			}()
		}
		for range exitingWorld - 1 {
			<-done
		}
		require.NoError(t, cmd.Wait(), &stderr)
		for _, err := range errs[1:] {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
			require.ErrorIs(t, err, ErrInvalid)
		}
	}
}

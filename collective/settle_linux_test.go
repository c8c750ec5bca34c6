package collective

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/memory"
)

// clustered is a function whose blocks come in clusters of 8.
type clustered struct{ device.Function }

func (clustered) ClusterBlocks() int { return 8 }

// TestSettle: the launch is the same whichever rank works it out, and fits the least of the devices, however ranks share them.
func TestSettle(t *testing.T) {
	partly := deviceOffer{Processors: 132, Resident: map[int]int{256: 128}}
	large := deviceOffer{Processors: 132, Resident: map[int]int{128: 1056, 256: 528}}
	small := deviceOffer{Processors: 16, Resident: map[int]int{128: 128, 256: 64}}
	none := deviceOffer{Processors: 132, Resident: map[int]int{128: 0, 256: 0}}
	tiny := deviceOffer{Processors: 1, Resident: map[int]int{128: 2, 256: 1}}
	few := large
	few.Most = 9
	of := map[rune]deviceOffer{'f': few, 'a': large, 'b': large, 'c': large, 'd': partly, 'z': none, 's': small, 'n': none, 't': tiny}
	twice := func(threads int) func(int) (int, int) {
		return func(processors int) (int, int) { return 2 * processors, threads }
	}
	exactly := func(blocks, threads int) func(int) (int, int) {
		return func(int) (int, int) { return blocks, threads }
	}
	for _, c := range []struct {
		devices   string
		fit       func(processors int) (blocks, threads int)
		minBlocks int
		blocks    int
		takes     float64 // of the device that it takes most of, with all ranks there
		wrong     string  // what the error says
	}{
		{"a", exactly(5000, 256), 5000, 5000, 0, ""}, // a rank alone waits for nobody
		{"a", exactly(7, 256), 8, 0, 0, "at most 7 of 256 threads"},
		{"ab", twice(256), 0, 256, 256. / 528, ""},
		{"ab", exactly(7, 256), 0, 7, 7. / 528, ""},
		{"ab", exactly(256, 256), 256, 256, 256. / 528, ""},
		{"ab", exactly(128, 256), 0, 128, 128. / 528, ""},
		{"ab", exactly(32, 128), 32, 32, 32. / 1056, ""},
		{"aabb", twice(256), 0, 128, 256. / 528, ""},
		{"aab", twice(256), 0, 128, 256. / 528, ""},
		{"aaaaaaaa", twice(256), 0, 32, 256. / 528, ""},
		{"as", twice(256), 0, 30, 30. / 64, ""},
		{"f", exactly(5000, 256), 0, 9, 0, ""},
		{"af", twice(256), 0, 9, 9. / 528, ""},
		{"fa", exactly(7, 256), 0, 7, 7. / 528, ""},
		{"af", exactly(300, 256), 10, 0, 0, "at most 9 of 256 threads"},
		{"an", twice(256), 0, 0, 0, "rank 1"},
		{"att", twice(256), 0, 0, 0, "which 2 ranks share"},
		{"ab", exactly(300, 256), 257, 0, 0, "at most 256 of 256 threads"},
		{"ab", exactly(1, 100), 0, 0, 0, "1 blocks of 100 threads"},
		// c is b, with a kernel in clusters of 8.
		{"cc", twice(256), 0, 128, 256. / 528, ""},
		{"c", exactly(5000, 256), 0, 5000, 0, ""},
		{"c", exactly(15, 256), 0, 8, 0, ""},
		{"cs", twice(256), 0, 24, 24. / 64, ""},
		{"cf", twice(256), 0, 8, 8. / 528, ""},
		{"cb", exactly(31, 256), 0, 24, 24. / 528, ""},
		{"cb", exactly(31, 256), 25, 0, 0, "MinBlocks is 25; allowed: at most 24 of 256 threads"},
		{"cd", twice(256), 0, 56, 56. / 128, ""}, // where fewer clusters fit than its multiprocessors have room for blocks
		{"cz", twice(256), 0, 0, 0, "rank 1"},    // where none fits
		{"cb", exactly(7, 256), 0, 0, 0, "MinBlocks is 8; allowed: at most 0 of 256 threads"},
		{"ab", exactly(0, 128), 0, 0, 0, "0 blocks"},
		{"ab", exactly(-1, 128), 0, 0, 0, "-1 blocks"},
	} {
		t.Run(fmt.Sprintf("%s/%d/%d/%s", c.devices, c.minBlocks, c.blocks, c.wrong), func(t *testing.T) {
			var offers []memory.WorkspaceOffer
			for _, d := range c.devices {
				blob, err := json.Marshal(of[d])
				require.NoError(t, err)
				offers = append(offers, memory.WorkspaceOffer{Device: string(d), Offer: blob})
			}
			backendtest.RequireAll(t, backendtest.OnRanks(t, len(c.devices), nil, func(ctx context.Context, g *group.Group) error {
				b, err := host.New(g, nil)
				if err != nil {
					return err
				}
				m := memory.New(b, g, nil)
				const data, block = 1000, 64
				f := &kernelForm{
					plan:   &Plan{memory: m, rank: g.Rank(), size: g.Size(), spec: Spec{Workspace: data}},
					kernel: &Kernel{Fit: c.fit, MinBlocks: c.minBlocks, BlockWorkspace: block},
				}
				if strings.HasPrefix(c.devices, "c") {
					f.function = clustered{}
				}
				bytes, err := f.settle(offers)
				if c.wrong != "" {
					if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), c.wrong) {
						return fmt.Errorf("%q is not in the error: %w", c.wrong, err)
					}
					return m.Close(ctx)
				}
				if err != nil {
					return err
				}
				want := ptx.ControlBytes(c.blocks, g.Size()) + data + int64(c.blocks)*block
				if f.blocks != c.blocks || bytes != want {
					return fmt.Errorf("%d blocks and %d bytes of workspace, not %d", f.blocks, bytes, want)
				}
				if (f.tenant == nil) != (g.Size() == 1) || g.Size() > 1 && math.Abs(f.tenant.takes-c.takes) > 1e-9 {
					return fmt.Errorf("it takes %+v of the device, and not %v", f.tenant, c.takes)
				}
				if shared := strings.Count(c.devices, c.devices[g.Rank():g.Rank()+1]) > 1; g.Size() > 1 && f.tenant.shared != shared {
					return fmt.Errorf("whether others of the process have its device: %t", f.tenant.shared)
				}
				return m.Close(ctx)
			}))
		})
	}
	f := &kernelForm{plan: &Plan{size: 2}, kernel: &Kernel{Fit: twice(256)}}
	_, err := f.settle([]memory.WorkspaceOffer{{Device: "a", Offer: []byte("{")}, {}})
	require.ErrorContains(t, err, "rank 0")
}

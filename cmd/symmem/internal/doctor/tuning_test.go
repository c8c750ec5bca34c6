package doctor

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/machine"
	"github.com/symmem/symmem/cmd/symmem/internal/probe"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/kernels/tuning"
)

// TestTuning: which table a program would go by, or why none could start.
func TestTuning(t *testing.T) {
	gpus := func(names ...string) []probe.Finding {
		return []probe.Finding{
			{Name: "native", Available: true, Libraries: []backend.Library{{Name: "driver", Devices: names}}},
			{Name: "host", Available: true, Capabilities: backend.Capabilities{OnHost: true}},
		}
	}
	file := func(table *tuning.Table) string {
		text, err := table.Text()
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "table.json")
		require.NoError(t, os.WriteFile(path, text, 0o600))
		return path
	}
	model := tuning.Model(tuning.LinkNVLink, 2, tuning.Speed{Hop: 2, Bandwidth: 300}, false)
	model.Devices, model.Date = []string{"NVIDIA B200"}, "2026-11-23"
	b200 := file(model)
	for name, tt := range map[string]struct {
		backends []probe.Finding
		wanted   string
		file     string
		ok       bool
		says     string
	}{
		"H200":                       {gpus("NVIDIA H200", "NVIDIA H200"), "auto", "", true, "the shipped table of NVIDIA H200"},
		"H100":                       {gpus("NVIDIA H100 80GB HBM3"), "auto", "", true, "the shipped table of NVIDIA H100 80GB HBM3"},
		"a GPU that nobody knows":    {gpus("NVIDIA B200"), "auto", "", true, "a model of the links, which are measured when a group is opened: no table comes with symmem for NVIDIA B200"},
		"GPUs that are unlike":       {gpus("NVIDIA B200", "NVIDIA H200"), "auto", "", true, "not alike: there are NVIDIA B200 and NVIDIA H200"},
		"a driver that says nothing": {gpus(), "auto", "", true, "not known"},
		"the CPU":                    {gpus("NVIDIA H200"), "host", "", true, "the shipped table for links of kind host"},
		"a file":                     {gpus("NVIDIA B200"), "auto", b200, true, "the file " + b200 + ", of 2026-11-23"},
		"a file of another GPU":      {gpus("NVIDIA H200"), "auto", b200, false, "NVIDIA H200"},
		"a file of a GPU on the CPU": {gpus("NVIDIA B200"), "host", b200, false, "over nvlink"},
		"no file":                    {gpus("NVIDIA B200"), "auto", "/no/such.json", false, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Backend, cfg.Tuning = []string{tt.wanted}, tt.file
			d := Diagnosis{Backends: tt.backends, Machine: machine.Machine{CPU: "a processor"}}
			d.judge(cfg)
			require.True(t, d.Verdict.OK)
			d.tune(cfg)
			assert.Equal(t, tt.ok, d.Verdict.OK)
			assert.Equal(t, tt.ok, d.Tuning.Error == "")
			var text bytes.Buffer
			require.NoError(t, d.Write(&text, false, terminal.Painter{}))
			assert.Contains(t, text.String(), tt.says)
			assert.Contains(t, text.String(), "\nTuning\n")
			if !tt.ok {
				assert.Contains(t, d.Verdict.Text, "no program starts")
			}
		})
	}
	var d Diagnosis
	d.tune(config.Default())
	assert.Empty(t, d.Tuning.Table, "without a backend there is nothing to choose")
}

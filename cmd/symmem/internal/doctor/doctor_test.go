package doctor

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	_ "github.com/symmem/symmem/backend/all" // it judges the backends that are registered
	"github.com/symmem/symmem/cmd/symmem/internal/probe"
	"github.com/symmem/symmem/config"
)

// TestJudgesLikeChoose holds doctor's verdict to what a program takes, the exception for the CPU's memory included.
func TestJudgesLikeChoose(t *testing.T) {
	at := func(onHost bool) backend.Capabilities { return backend.Capabilities{OnHost: onHost} }
	for name, tt := range map[string]struct {
		wanted []string
		has    []probe.Finding
		want   string
	}{
		"a GPU before the CPU":         {[]string{"auto"}, []probe.Finding{{Name: "nixl", Available: true, Capabilities: at(false)}, {Name: "host", Available: true, Capabilities: at(true)}}, "nixl"},
		"the CPU's own for its memory": {[]string{"auto"}, []probe.Finding{{Name: "nixl", Available: true, Capabilities: at(true)}, {Name: "host", Available: true, Capabilities: at(true)}}, "host"},
		"unless it was named":          {[]string{"nixl", "auto"}, []probe.Finding{{Name: "nixl", Available: true, Capabilities: at(true)}, {Name: "host", Available: true, Capabilities: at(true)}}, "nixl"},
		"or there is no other":         {[]string{"auto"}, []probe.Finding{{Name: "nixl", Available: true, Capabilities: at(true)}, {Name: "host"}}, "nixl"},
		"none":                         {[]string{"nixl"}, []probe.Finding{{Name: "nixl"}, {Name: "host", Available: true, Capabilities: at(true)}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Backend = tt.wanted
			d := Diagnosis{Backends: tt.has}
			d.judge(cfg)
			assert.Equal(t, tt.want, d.Verdict.Backend)
			assert.Equal(t, tt.want != "", d.Verdict.OK)
		})
	}
}

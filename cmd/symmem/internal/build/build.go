// Package build says which build of the command this is.
package build

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// path is this module.
const path = "github.com/symmem/symmem"

// Info describes the build that runs.
type Info struct {
	Version  string `json:"version"`            // of the module: "v0.1.0", or "(devel)" from a checkout
	Revision string `json:"revision,omitempty"` // of the checkout
	Modified bool   `json:"modified,omitempty"` // the checkout had changes
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
}

// Read reads the information that the linker left in this executable.
func Read() Info {
	b := Info{Version: "(devel)", Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if info.Main.Path != path { // a command of somebody else's, whose revision is not ours
		for _, m := range info.Deps {
			if m.Path == path {
				b.Version = m.Version
			}
		}
		return b
	}
	if info.Main.Version != "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

// String returns the line that version prints.
func (b Info) String() string {
	text := fmt.Sprintf("symmem %s", b.Version)
	if b.Revision != "" {
		text += " " + b.Revision[:min(len(b.Revision), 12)]
		if b.Modified {
			text += " (modified)"
		}
	}
	return fmt.Sprintf("%s %s %s/%s", text, b.Go, b.OS, b.Arch)
}

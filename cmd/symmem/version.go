package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// buildInfo says which build of the command this is.
type buildInfo struct {
	Version  string `json:"version"`            // of the module: "v0.1.0", or "(devel)" from a checkout
	Revision string `json:"revision,omitempty"` // of the checkout
	Modified bool   `json:"modified,omitempty"` // the checkout had changes
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
}

// readBuild reads what the linker has left in this executable.
func readBuild() buildInfo {
	b := buildInfo{Version: "(devel)", Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
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

// String is the one line that version prints.
func (b buildInfo) String() string {
	text := fmt.Sprintf("symmem %s", b.Version)
	if b.Revision != "" {
		text += " " + b.Revision[:min(len(b.Revision), 12)]
		if b.Modified {
			text += " (modified)"
		}
	}
	return fmt.Sprintf("%s %s %s/%s", text, b.Go, b.OS, b.Arch)
}

func (a *app) versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Say which build this is",
		Args:  noArgs,
		RunE: failing(func(*cobra.Command, []string) error {
			if asJSON {
				return writeJSON(a.out, readBuild())
			}
			_, err := fmt.Fprintln(a.out, readBuild())
			return err
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, jsonUsage)
	return cmd
}

// writeJSON writes v for people and programs to read.
func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

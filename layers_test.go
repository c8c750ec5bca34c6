package symmem_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/symmem/symmem"

// mayImport says of each package which others its own code (not its tests) may import: only what stands below it.
// A trailing "/..." stands for the room and all below it. Rooms under internal/ may be imported by all, those of the command excepted.
var mayImport = map[string][]string{
	".":                        {"config", "group", "device", "backend", "backend/host", "memory", "tensor", "kernels", "kernels/tuning"},
	"config":                   {},
	"group":                    {"group/durable"},
	"group/durable":            {},
	"group/durable/etcd":       {"group/durable"},
	"device":                   {},
	"device/host":              {"device"},
	"device/cuda":              {"device"},
	"device/devicetest":        {"device"},
	"backend":                  {"device", "group"},
	"memory":                   {"backend", "device", "group", "kernels/ptx", "kernels/tuning"},
	"backend/host":             {"backend", "device", "device/host", "group"},
	"backend/native":           {"backend", "device", "device/cuda", "group", "kernels/ptx/images"},
	"backend/nvshmem":          {"backend", "device", "device/cuda", "group", "kernels/ptx/images"},
	"backend/nccl":             {"backend", "device", "device/cuda", "group", "kernels/ptx/images"},
	"backend/nixl":             {"backend", "backend/host", "backend/native", "device", "device/cuda", "device/host", "group", "kernels/ptx/images"},
	"backend/backendtest":      {"backend", "device", "group", "memory"},
	"backend/all":              {"backend/..."},
	"tensor":                   {"backend", "device", "memory"},
	"collective":               {"tensor", "memory", "device", "kernels/ptx"},
	"kernels":                  {"collective", "tensor", "memory", "device", "group", "kernels/ptx", "kernels/tuning"},
	"kernels/kernelstest":      {"device", "memory", "tensor"},
	"kernels/tuning":           {},
	"kernels/ptx":              {},
	"kernels/ptx/images":       {"kernels/ptx"},
	"backend/internal/survey":  {"backend"},
	"backend/internal/fromenv": {"backend"},
	"tests/suite":              {".", "config", "group", "device", "backend", "memory", "tensor", "collective", "kernels"},
	"tests/mutants":            {},
	"cmd/symmem":               {"backend/all", "cmd/symmem/command", "cmd/symmem/internal/simulate", "group/durable/etcd"},
	"cmd/symmem/symmem-rendezvous": {"cmd/symmem/internal/build", "cmd/symmem/internal/cli", "cmd/symmem/internal/process", "cmd/symmem/internal/rendezvous",
		"group/durable/etcd"},
	"cmd/symmem/command": {"backend", "config", "group", "kernels", "tensor", "cmd/symmem/internal/..."},
	"examples/allreduce": {".", "config", "group", "device", "backend/all", "tensor", "kernels"},
	"examples/start":     {".", "backend/all", "config", "kernels", "tensor"},
	"examples/ring":      {".", "config", "group", "device", "backend/all", "tensor", "kernels"},

	// What the sub-commands of symmem share, the lowest first.
	"cmd/symmem/internal/bytesize":              {},
	"cmd/symmem/internal/build":                 {},
	"cmd/symmem/internal/exit":                  {},
	"cmd/symmem/internal/process":               {},
	"cmd/symmem/internal/suggest":               {},
	"cmd/symmem/internal/terminal":              {},
	"cmd/symmem/internal/terminal/terminaltest": {},
	"cmd/symmem/internal/chart":                 {},
	"cmd/symmem/internal/outfile":               {},
	"cmd/symmem/internal/machine":               {"cmd/symmem/internal/bytesize"},
	"cmd/symmem/internal/cli":                   {"cmd/symmem/internal/exit", "cmd/symmem/internal/process", "cmd/symmem/internal/suggest", "cmd/symmem/internal/terminal"},
	"cmd/symmem/internal/rendezvous": {"config", "group", "cmd/symmem/internal/cli", "cmd/symmem/internal/exit", "cmd/symmem/internal/launch",
		"cmd/symmem/internal/process", "cmd/symmem/internal/settings"},
	"cmd/symmem/internal/settings": {"config", "cmd/symmem/internal/exit", "cmd/symmem/internal/suggest"},
	"cmd/symmem/internal/probe": {"backend", "config", "cmd/symmem/internal/launch", "cmd/symmem/internal/process", "cmd/symmem/internal/settings",
		"cmd/symmem/internal/terminal"},
	"cmd/symmem/internal/launch":  {"group", "cmd/symmem/internal/exit", "cmd/symmem/internal/process", "cmd/symmem/internal/terminal"},
	"cmd/symmem/internal/measure": {".", "backend", "memory", "device", "device/cuda", "group", "kernels", "kernels/tuning", "tensor", "cmd/symmem/internal/bytesize"},
	"cmd/symmem/internal/fleet": {".", "backend", "config", "device", "group", "cmd/symmem/internal/exit", "cmd/symmem/internal/launch", "cmd/symmem/internal/probe",
		"cmd/symmem/internal/process", "cmd/symmem/internal/settings", "cmd/symmem/internal/suggest"},
	"cmd/symmem/internal/doctor": {"backend", "config", "group", "kernels/tuning", "cmd/symmem/internal/build", "cmd/symmem/internal/bytesize", "cmd/symmem/internal/fleet",
		"cmd/symmem/internal/machine", "cmd/symmem/internal/probe", "cmd/symmem/internal/process", "cmd/symmem/internal/settings", "cmd/symmem/internal/terminal"},
	"cmd/symmem/internal/simulate": {"backend/native", "backend/nccl", "backend/nvshmem", "config", "cmd/symmem/internal/verify"},
	"cmd/symmem/internal/verify": {".", "backend", "config", "device", "tests/suite", "cmd/symmem/internal/exit", "cmd/symmem/internal/fleet", "cmd/symmem/internal/launch",
		"cmd/symmem/internal/probe", "cmd/symmem/internal/process", "cmd/symmem/internal/settings", "cmd/symmem/internal/terminal"},
	"cmd/symmem/internal/bench": {".", "config", "device", "kernels", "tensor", "cmd/symmem/internal/build", "cmd/symmem/internal/bytesize",
		"cmd/symmem/internal/chart", "cmd/symmem/internal/exit", "cmd/symmem/internal/fleet", "cmd/symmem/internal/launch", "cmd/symmem/internal/machine",
		"cmd/symmem/internal/measure", "cmd/symmem/internal/outfile", "cmd/symmem/internal/process", "cmd/symmem/internal/settings", "cmd/symmem/internal/suggest",
		"cmd/symmem/internal/terminal"},

	"cmd/symmem/internal/tune": {".", "config", "kernels/tuning", "cmd/symmem/internal/build", "cmd/symmem/internal/bytesize", "cmd/symmem/internal/exit", "cmd/symmem/internal/fleet",
		"cmd/symmem/internal/launch", "cmd/symmem/internal/machine", "cmd/symmem/internal/measure", "cmd/symmem/internal/outfile", "cmd/symmem/internal/process",
		"cmd/symmem/internal/settings", "cmd/symmem/internal/suggest", "cmd/symmem/internal/terminal"},

	// A machine for PTX, which knows nothing of this module.
	"internal/ptxvm": {},

	// Pretended GPUs for the tests of backends: it knows the driver's table, which backendtest itself does not.
	"backend/backendtest/fakecuda": {"backend/backendtest", "device"},

	// Simulated GPUs: a table of the driver for device/cuda, and a machine for its kernels.
	"internal/simcuda": {"device", "device/cuda"},

	// Simulated libraries over them, of whose tables they fill those that backends call.
	"internal/simlib": {"device", "tensor"},

	// The driver as it is: of device it takes addresses and the conditions of errors.
	"internal/cuda": {"device"},
}

// raw lists the rooms under internal/ that are native libraries as they are, and who may import them.
var raw = map[string][]string{
	"internal/cuda": {"device/cuda", "backend/native", "backend/nccl", "backend/nvshmem", "backend/nixl", "backend/backendtest/fakecuda", "internal/simcuda", "internal/simlib", "cmd/symmem/internal/measure"},
}

// native lists the rooms that may load native libraries; a program that imports no other stays a static binary.
var native = []string{"internal/dl", "internal/nccl", "internal/cublas", "device/cuda", "backend/native", "backend/nccl", "backend/nvshmem", "backend/nixl"}

func TestRoomsImportOnlyWhatIsBelow(t *testing.T) {
	seen := map[string]bool{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != "." && (strings.HasPrefix(name, ".") || name == "testdata") {
				return filepath.SkipDir
			}
			if _, err := os.Stat(filepath.Join(path, "go.mod")); path != "." && err == nil {
				return filepath.SkipDir // another module, to which the compiler shows what is public and no more
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		room := filepath.ToSlash(filepath.Dir(path))
		seen[room] = true
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, spec := range f.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if strings.HasPrefix(imported, "github.com/ebitengine/purego") && !slices.ContainsFunc(native, func(n string) bool { return room == n || strings.HasPrefix(room, n+"/") }) {
				t.Errorf("%s imports %s: only %s load native libraries", path, imported, strings.Join(native, ", "))
			}
			below, ours := strings.CutPrefix(imported, module)
			if !ours {
				continue
			}
			below = strings.TrimPrefix(below, "/")
			if below == "" {
				below = "."
			}
			if users, ok := raw[below]; ok && !slices.Contains(users, room) {
				t.Errorf("%s imports %s, which only %v may", path, imported, users)
			}
			if strings.HasPrefix(below, "internal/") || strings.Contains(below, "/internal/") && !strings.HasPrefix(below, "cmd/") {
				continue
			}
			allowed, known := mayImport[room]
			if !known && !strings.HasPrefix(room, "internal/") && !strings.Contains(room, "/internal/") {
				t.Errorf("room %s is in no list: say in mayImport what it may know", room)
				return nil
			}
			if !slices.ContainsFunc(allowed, func(a string) bool {
				all, tree := strings.CutSuffix(a, "/...")
				return a == below || tree && (below == all || strings.HasPrefix(below, all+"/"))
			}) {
				t.Errorf("%s imports %s: room %s may know only %v", path, imported, room, allowed)
			}
		}
		return nil
	})
	require.NoError(t, err)
	for _, room := range []string{".", "config", "group", "device", "device/host", "backend", "backend/host", "tensor", "collective", "kernels", "tests/suite", "cmd/symmem/command"} {
		require.Truef(t, seen[room], "no code was found in room %s", room)
	}
}

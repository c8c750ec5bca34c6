package cuda_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/cheader"
	cu "github.com/symmem/symmem/internal/cuda"
)

// TestHeader compares every number of this package, and every function, with cuda.h: of the oldest version that is supported, and
// of newer ones.
func TestHeader(t *testing.T) {
	all := constants(t)
	types := structures(t)
	oldest := false
	cheader.Run(t, "cuda", readHeader, func(c *cheader.Check) {
		first := isOldest(c.Version)
		if first {
			oldest = true
			c.Const("CUDA_VERSION", cu.MinVersion)
		}
		for name, value := range all {
			if !first || !newer[name] {
				c.Const(name, value)
			}
		}
		for name, of := range types {
			c.Struct(name, of)
		}
		eachSymbol(c.Func)
	})
	assert.True(t, oldest, "no header of CUDA 12.4, the oldest that is supported, is recorded")
}

// newer are constants that the oldest header does not have yet.
var newer = map[string]bool{"CUDA_ERROR_CONTAINED": true, "CUDA_ERROR_TENSOR_MEMORY_LEAK": true}

func isOldest(version string) bool { return strings.HasPrefix(version, "12.4.") }

// readHeader reads cuda.h. The oldest declares each function under the symbol that a program gets which is compiled with it, cuMemAlloc as
// cuMemAlloc_v2 say, and that is the one to bind. In a newer one there may be a later version of it, and the one that is bound here is
// among those that the header keeps for programs that were compiled before.
func readHeader(folder string) (*cheader.Header, error) {
	o := cheader.Options{Files: []string{filepath.Join(folder, "cuda.h")}}
	h, err := cheader.Read(o)
	if err != nil || isOldest(strings.TrimPrefix(filepath.Base(folder), "cuda-")) {
		return h, err
	}
	o.Defines = map[string]string{"__CUDA_API_VERSION_INTERNAL": "1"}
	kept, err := cheader.Read(o)
	if err != nil {
		return nil, err
	}
	h.AddFuncs(kept)
	return h, nil
}

// eachSymbol calls f for each function of the tables.
func eachSymbol(f func(symbol string, of reflect.Type)) {
	for _, table := range []any{cu.Driver{}, cu.Multicast{}} {
		for _, field := range reflect.VisibleFields(reflect.TypeOf(table)) {
			if symbol, _, _ := strings.Cut(field.Tag.Get("cuda"), ","); symbol != "" {
				f(symbol, field.Type)
			}
		}
	}
}

// named is how the comment of a constant begins.
var named = regexp.MustCompile(`^// (CU[A-Z]*_[A-Z0-9_]+)`)

// files are where the numbers are.
var files = []string{"types.go", "result.go"}

// constants reads those of the package, by the header's name. One without that is an error: nobody could compare it.
func constants(t *testing.T) map[string]int64 {
	t.Helper()
	all := make(map[string]int64)
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		require.NoError(t, err)
		for _, d := range f.Decls {
			group, ok := d.(*ast.GenDecl)
			if !ok || group.Tok != token.CONST {
				continue
			}
			for _, spec := range group.Specs {
				one := spec.(*ast.ValueSpec)
				if !one.Names[0].IsExported() {
					continue
				}
				var m []string
				if one.Comment != nil {
					m = named.FindStringSubmatch(one.Comment.List[0].Text)
				}
				if !assert.NotNil(t, m, "%s is not followed by cuda.h's name for it", one.Names[0].Name) {
					continue
				}
				value, err := strconv.ParseInt(one.Values[0].(*ast.BasicLit).Value, 0, 64)
				require.NoError(t, err, one.Names[0].Name)
				all[m[1]] = value
			}
		}
	}
	require.Greater(t, len(all), 50)
	return all
}

// structures returns the types of the package that are more than a number, by the header's name. All must be there.
func structures(t *testing.T) map[string]reflect.Type {
	t.Helper()
	known := map[string]any{
		"CUuuid": cu.UUID{}, "CUmemLocation": cu.MemLocation{}, "CUmemAllocationProp": cu.MemAllocationProp{}, "CUmemFabricHandle": cu.FabricHandle{},
		"CUmemAccessDesc": cu.MemAccessDesc{}, "CUmulticastObjectProp": cu.MulticastObjectProp{}, "CUipcMemHandle": cu.IPCMemHandle{},
		"CUlaunchConfig": cu.LaunchConfig{}, "CUlaunchAttribute": cu.LaunchAttribute{}, "CUstreamBatchMemOpParams": cu.BatchMemOp{},
		"CUgraphEdgeData": cu.GraphEdgeData{},
	}
	types, names := make(map[string]reflect.Type), make(map[string]bool)
	for name, value := range known {
		types[name] = reflect.TypeOf(value)
		names[types[name].Name()] = true
	}
	f, err := parser.ParseFile(token.NewFileSet(), "types.go", nil, 0)
	require.NoError(t, err)
	ast.Inspect(f, func(n ast.Node) bool {
		if one, ok := n.(*ast.TypeSpec); ok {
			switch one.Type.(type) {
			case *ast.StructType, *ast.ArrayType:
				assert.True(t, names[one.Name.Name], "%s is not compared with cuda.h", one.Name.Name)
			}
		}
		return true
	})
	return types
}

package dl_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/internal/dl"
)

// TestAdvice: each reason comes with what to do about that reason, once.
func TestAdvice(t *testing.T) {
	const notThere = "cannot open shared object file: No such file or directory"
	for name, c := range map[string]struct {
		err         error
		reason, fix string
	}{
		"not there": {&dl.LoadError{Library: "L", Attempts: []dl.Attempt{{Path: "a.so", Text: "a.so: " + notThere}}, Hint: "install L"},
			"loading L: tried a.so (" + notThere + ")", "install L"},
		"broken": {&dl.LoadError{Library: "L", Attempts: []dl.Attempt{{Path: "/x/a.so", Text: "/x/a.so: file too short"}}, Hint: "install L"},
			"loading L: tried /x/a.so (file too short)", "replace or remove /x/a.so, which cannot be loaded, or install L"},
		"needs another": {&dl.LoadError{Library: "L", Attempts: []dl.Attempt{{Path: "/x/a.so", Text: "libb.so.2: " + notThere}}, Hint: "install L"},
			"loading L: tried /x/a.so (libb.so.2: " + notThere + ")", "install libb.so.2, which /x/a.so needs, or install L"},
		"too old": {fmt.Errorf("opening: %w", &dl.SymbolError{Library: "L", Symbols: []string{"f"}, Hint: "version 2 has it"}),
			"opening: L does not have f", "version 2 has it"},
		"a call":      {&dl.Error{Library: "L", Call: "start", Code: 3, Hint: "start the service"}, "L: start returned 3", "start the service"},
		"no advice":   {&dl.Error{Library: "L", Call: "start", Code: 3}, "L: start returned 3", ""},
		"not of ours": {errors.New("there is no light; switch it on"), "there is no light; switch it on", ""},
	} {
		t.Run(name, func(t *testing.T) {
			reason, fix := dl.Advice(c.err)
			assert.Equal(t, c.reason, reason)
			assert.Equal(t, c.fix, fix)
		})
	}
}

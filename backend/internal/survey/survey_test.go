package survey

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/dl"
)

func TestFailed(t *testing.T) {
	lacking := &dl.SymbolError{Library: "L (/x/libl.so)", Symbols: []string{"f"}, Hint: "version 2 has it"}
	assert.Equal(t, backend.Library{Name: "L", State: "unusable", Reason: "binding: L (/x/libl.so) does not have f", Fix: "version 2 has it"},
		Failed("L", fmt.Errorf("binding: %w", lacking), "other"))
	call := &dl.Error{Library: "L", Call: "start", Code: 3, Hint: "start the service"}
	assert.Equal(t, backend.Library{Name: "L", State: "unusable", Reason: "L: start returned 3", Fix: "start the service"}, Failed("L", call, "other"))
	assert.Equal(t, backend.Library{Name: "L", State: "unusable", Reason: "too old", Fix: "install a newer one"},
		Failed("L", errors.New("too old"), "install a newer one"))
}

package durable

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

// TestSecretsAreNotShown: neither an error nor what is printed of a URL has the password, wherever a mistake has put it.
func TestSecretsAreNotShown(t *testing.T) {
	for _, text := range []string{
		"user:hunter2@localhost:2379/x", // the scheme is missing
		"kept:user:hunter2@localhost:2379/x",
		"kept:/user:hunter2@localhost:2379/x",
		"kept:///user:hunter2@localhost:2379/x",
		"kept://user:12#hunter2@localhost:2379/x", // a password with a character that ends it
		"kept://user:12?hunter2@localhost:2379/x",
		"kept://user:12/hunter2@localhost:2379/x",
		"kept://user:hunter2%@localhost:2379/x",
	} {
		assert.NotContains(t, Redacted(text), "hunter2", text)
		_, err := Open(context.Background(), text, Options{})
		require.ErrorIs(t, err, errs.ErrInvalid, text)
		assert.NotContains(t, err.Error(), "hunter2", text)
	}
	for text, shown := range map[string]string{
		"kept://user:hunter2@localhost:2379/x":     "kept://user:xxxxx@localhost:2379/x",
		"kept://user:hunt@er2@localhost:2379/x":    "kept://user:xxxxx@localhost:2379/x",
		"kept://user:12%23hunter2@localhost:1/%40": "kept://user:xxxxx@localhost:1/%40",
		"kept://localhost:2379/x?cacert=y":         "kept://localhost:2379/x?cacert=y",
	} {
		assert.Equal(t, shown, Redacted(text))
	}
}

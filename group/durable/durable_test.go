package durable

import (
	"context"
	"net/url"
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
		"kept://user:[::1]:1,hunter2/@localhost:2379/x",
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

// TestSeveralHosts: a URL may name several hosts, IPv6 addresses among them.
func TestSeveralHosts(t *testing.T) {
	var got *url.URL
	Register("several", func(_ context.Context, u *url.URL, _ Options) (Store, error) {
		got = u
		return nil, nil
	})
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		delete(openers, "several")
	})
	for text, hosts := range map[string]string{
		"several://10.0.0.1:2379,10.0.0.2:2379/x":                       "10.0.0.1:2379,10.0.0.2:2379",
		"several://[fd00::1]:2379/x":                                    "[fd00::1]:2379",
		"several://[fd00::1]:2379,[fd00::2]:2379/x":                     "[fd00::1]:2379,[fd00::2]:2379",
		"several://user:hunter2@one:2379,[fd00::2]:2379,two:2379/x?a=b": "one:2379,[fd00::2]:2379,two:2379",
	} {
		_, err := Open(context.Background(), text, Options{})
		require.NoError(t, err, text)
		assert.Equal(t, hosts, got.Host)
		assert.Equal(t, "/x", got.Path)
		assert.Contains(t, Redacted(text), hosts)
		assert.NotContains(t, Redacted(text), "hunter2")
	}
	for _, text := range []string{"several://[fd00::1]:2379,[fd00::2/x", "several://[fd00::1]:2379,[10.0.0.1]:2379/x", "several://[fd00::1]:2379,[fd00::2]:x/x", "several://[fd00::1]:2379,[fd00::2]:2379/%x"} {
		_, err := Open(context.Background(), text, Options{})
		assert.ErrorIs(t, err, errs.ErrInvalid, text)
	}
}

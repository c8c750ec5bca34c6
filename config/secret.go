package config

import (
	"crypto/subtle"
	"fmt"
	"log/slog"
)

// redacted is what a secret shows in place of its text.
const redacted = "[redacted]"

// Secret is a text that must not be printed. Every way of formatting it (package fmt with any verb, log/slog, encoding/json and
// other text encodings) gives "[redacted]", or nothing if it is empty. [Secret.Reveal] gives the text. The zero Secret is
// empty. A Secret may be copied, and used by several goroutines at once.
type Secret struct {
	// The text is behind a pointer because fmt does not call String on the unexported fields of a struct it prints; there
	// it prints an address instead of the text.
	text *string
}

// NewSecret makes a Secret of text.
func NewSecret(text string) Secret {
	if text == "" {
		return Secret{}
	}
	return Secret{text: &text}
}

// Reveal returns the text itself.
func (s Secret) Reveal() string {
	if s.text == nil {
		return ""
	}
	return *s.text
}

// IsZero reports whether the secret is empty.
func (s Secret) IsZero() bool { return s.text == nil }

// Equal reports whether both secrets are the same text, in a time that does not depend on where they differ.
func (s Secret) Equal(other Secret) bool {
	return subtle.ConstantTimeCompare([]byte(s.Reveal()), []byte(other.Reveal())) == 1
}

// String returns "[redacted]", or "" for an empty secret.
func (s Secret) String() string {
	if s.IsZero() {
		return ""
	}
	return redacted
}

// GoString returns the form of %#v, without the text.
func (s Secret) GoString() string { return fmt.Sprintf("config.Secret(%q)", s.String()) }

// Format prints the form of String or, for %q and %#v, a quoted form of it, whatever the verb.
func (s Secret) Format(f fmt.State, verb rune) {
	text := s.String()
	switch {
	case verb == 'v' && f.Flag('#'):
		text = s.GoString()
	case verb == 'q':
		text = fmt.Sprintf("%q", text)
	}
	// A State's Write never fails; fmt keeps the error of the writer behind it.
	_, _ = f.Write([]byte(text))
}

// LogValue returns the form of String for log/slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText returns the form of String for encoders, JSON among them.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText sets the secret to the text that a decoder has. It never fails.
func (s *Secret) UnmarshalText(text []byte) error {
	*s = NewSecret(string(text))
	return nil
}

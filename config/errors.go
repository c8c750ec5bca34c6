package config

import "github.com/symmem/symmem/internal/errs"

// ErrInvalid is what every refused setting is, for errors.Is.
var ErrInvalid = errs.ErrInvalid

// ArgumentError is a refused setting: the key, the value and what is allowed. It is ErrInvalid.
type ArgumentError = errs.ArgumentError

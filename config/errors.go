package config

import "github.com/symmem/symmem/internal/errs"

// ErrInvalid is what every refused setting is, for errors.Is.
var ErrInvalid = errs.ErrInvalid

//go:build !unix

package config

import (
	"io/fs"
	"os"
)

// openFlags open a file for reading.
const openFlags = os.O_RDONLY

// planted finds nothing: files have no owners by number here.
func planted(string, fs.FileInfo) error { return nil }

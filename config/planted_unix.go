//go:build unix

package config

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/symmem/symmem/internal/errs"
)

// openFlags open a file for reading. A FIFO that nobody writes to must not hold up the opening, and a terminal must not become the process's.
const openFlags = os.O_RDONLY | syscall.O_NONBLOCK | syscall.O_NOCTTY

// What may be written by others, as bits of a mode.
const (
	groupWrite = 0o020
	otherWrite = 0o002
)

// planted says why others than this user and root may have written a file that nobody has named, or nil. info is that of the open file: what the path
// leads to may have changed since. A file names libraries that are loaded into the process, and where it meets others.
func planted(path string, info fs.FileInfo) error {
	// Whoever has made a link chose the file, and the directory that paths in it are relative to.
	entry, err := os.Lstat(path)
	switch {
	case err != nil:
		return err
	case entry.Mode().Type() == fs.ModeSymlink:
		if owner := ownerOf(entry); !own(owner.Uid) {
			return plantedError(path, "a link", entry, owner.Uid)
		}
	case !os.SameFile(entry, info): // it may have been a link
		return errs.Advised(op, "file", path+", exchanged for another while it was read", "a file that stays", "try again, or name a file with --"+configFlag+
			" or "+fileEnv)
	}
	owner := ownerOf(info)
	// A user's own group has nobody else in it on many systems, which therefore let it write all that the user makes.
	others := info.Mode().Perm() & (groupWrite | otherWrite)
	if owner.Uid == uint32(os.Geteuid()) && owner.Gid == uint32(os.Getegid()) {
		others &^= groupWrite
	}
	if own(owner.Uid) && others == 0 {
		return nil
	}
	return plantedError(path, "a file", info, owner.Uid)
}

// own reports whether a user is this one or root.
func own(user uint32) bool { return user == 0 || user == uint32(os.Geteuid()) }

// ownerOf returns what the system knows of a file.
func ownerOf(info fs.FileInfo) *syscall.Stat_t { return info.Sys().(*syscall.Stat_t) }

// plantedError refuses a file or a link.
func plantedError(path, what string, info fs.FileInfo, owner uint32) error {
	if whole, err := filepath.Abs(path); err == nil {
		path = whole
	}
	remedy := "chmod go-w it"
	if !own(owner) {
		remedy = "chown it"
	}
	return errs.Advised(op, "file", fmt.Sprintf("%s, %s of user %d with mode %#o", path, what, owner, info.Mode().Perm()),
		fmt.Sprintf("where none is named, a file of this user (%d) or of root that no other user may write", os.Geteuid()),
		"if it is meant, "+remedy+", or name it with --"+configFlag+" or "+fileEnv+"; if it is not, begin in another directory")
}

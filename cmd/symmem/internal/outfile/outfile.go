// Package outfile writes the files that commands are asked for, whole or not at all.
package outfile

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// File is a file to be written at the end of a command. What is there stays as it is until then.
type File struct {
	given   string // the path that was asked for, which errors name
	path    string // where its links lead to
	regular bool   // a regular file, or one that is not there yet; anything else, such as a terminal or a pipe, is written to
	there   bool
	mode    fs.FileMode // of the file that is there
}

// Plan sees that a file can be written, without changing anything: the time to say so is before the work. A link stands for what it leads to.
func Plan(path string) (*File, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		f := &File{given: path, path: path, regular: true}
		// A link may lead to a file that is still to be made.
		for link, err := os.Readlink(f.path); err == nil; link, err = os.Readlink(f.path) {
			if !filepath.IsAbs(link) {
				dir, err := filepath.EvalSymlinks(filepath.Dir(f.path))
				if err != nil {
					return nil, err
				}
				link = filepath.Join(dir, link)
			}
			f.path = link
		}
		return f, f.try()
	}
	if err != nil {
		return nil, err
	}
	f := &File{given: path, path: path, regular: info.Mode().IsRegular(), there: true, mode: info.Mode().Perm()}
	switch {
	case info.IsDir():
		return nil, fmt.Errorf("%s is a directory", path)
	case !f.regular:
		return f, nil
	}
	if f.path, err = filepath.EvalSymlinks(path); err != nil {
		return nil, err
	}
	there, err := os.OpenFile(f.path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	return f, there.Close()
}

// try sees that a file can be made in the folder.
func (f *File) try() error {
	temp, err := f.create()
	if err != nil {
		return err
	}
	return f.named(errors.Join(temp.Close(), os.Remove(temp.Name())))
}

// create makes a file beside the one that is to be written.
func (f *File) create() (*os.File, error) {
	temp, err := os.OpenFile(filepath.Join(filepath.Dir(f.path), ".symmem-"+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	return temp, f.named(err)
}

// named makes an error about the file beside one about the file that was asked for: nobody knows the other name.
func (f *File) named(err error) error {
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		return &fs.PathError{Op: path.Op, Path: f.given, Err: path.Err}
	}
	if link, ok := errors.AsType[*os.LinkError](err); ok {
		return &fs.PathError{Op: link.Op, Path: f.given, Err: link.Err}
	}
	return err
}

// Regular reports whether the file is there, and a regular one, so that it can be read.
func (f *File) Regular() bool { return f.there && f.regular }

// Same reports whether both are one file, of which the one that is written later would be left.
func (f *File) Same(other *File) bool {
	one, err := filepath.Abs(f.path)
	two, err2 := filepath.Abs(other.path)
	return f.regular && err == nil && err2 == nil && one == two
}

// Write writes the file: under another name first, which then takes the place of the file, so that an error leaves what was there. Only where the
// folder does not allow that, as with a single file that is mounted into a container, it is written in its place.
func (f *File) Write(text []byte) error {
	if !f.regular {
		return f.overwrite(text)
	}
	temp, err := f.beside(text)
	if temp == "" && f.there && errors.Is(err, fs.ErrPermission) {
		return f.overwrite(text)
	}
	if err != nil {
		return err
	}
	if err := os.Rename(temp, f.path); err != nil {
		if removed := os.Remove(temp); !f.there || removed != nil {
			return f.named(errors.Join(err, removed))
		}
		return f.overwrite(text)
	}
	return nil
}

// beside writes a file beside the one that is to be written, and returns its path, "" if none could be made. After an error none is left.
func (f *File) beside(text []byte) (path string, err error) {
	temp, err := f.create()
	if err != nil {
		return "", err
	}
	_, err = temp.Write(text)
	if err == nil && f.there {
		err = temp.Chmod(f.mode)
	}
	if err == nil {
		err = temp.Sync()
	}
	if err = errors.Join(err, temp.Close()); err != nil {
		err = f.named(errors.Join(err, os.Remove(temp.Name())))
	}
	return temp.Name(), err
}

// BusyError says that a file is locked.
type BusyError struct {
	Path string
	For  time.Duration // how long was waited for it
}

// Error names the file, how long was waited and what to do next.
func (e *BusyError) Error() string {
	return fmt.Sprintf("%s is locked by another process, and was for %v; end that (fuser -v names it) and try again, or name another file", e.Path, e.For)
}

// errLocked says that a lock is another's.
var errLocked = errors.New("locked by another process")

// Update writes the file, as Write does, with a text that is made of what is in it then: of several that update one file none loses what another has
// written. make is given the path of the file, "" where it is not there or not a regular one, and may be called again if another was faster. Update waits at most
// patience for others, and is a *BusyError then. Where the file system has no locks, two that write at the same moment are not told.
func (f *File) Update(patience time.Duration, make func(path string) ([]byte, error)) error {
	if !f.regular {
		text, err := make("")
		if err != nil {
			return err
		}
		return f.overwrite(text)
	}
	for deadline := time.Now().Add(patience); ; {
		done, err := f.update(deadline, make)
		if errors.Is(err, errLocked) || err == nil && !done && time.Now().After(deadline) {
			return &BusyError{Path: f.path, For: patience}
		}
		if done || err != nil {
			return err
		}
	}
}

// update tries once. done is false if another was faster.
func (f *File) update(deadline time.Time, make func(path string) ([]byte, error)) (done bool, err error) {
	there, err := os.OpenFile(f.path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return f.begin(make)
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, there.Close()) }() // which unlocks it
	if err := lock(there, deadline); err != nil {
		return false, err
	}
	info, err := there.Stat()
	if err != nil {
		return false, err
	}
	if now, err := os.Stat(f.path); err != nil || !os.SameFile(info, now) {
		return false, nil // another has taken its place while this one waited; an error is that of the next try
	}
	f.there, f.mode = true, info.Mode().Perm()
	text, err := make(f.path)
	if err != nil {
		return false, err
	}
	return true, f.Write(text)
}

// begin makes the file. done is false if it has come to be meanwhile.
func (f *File) begin(make func(path string) ([]byte, error)) (done bool, err error) {
	f.there = false
	text, err := make("")
	if err != nil {
		return false, err
	}
	temp, err := f.beside(text)
	if err != nil {
		return false, err
	}
	err = os.Link(temp, f.path) // unlike a rename it replaces nothing
	if err != nil && !errors.Is(err, fs.ErrExist) {
		if err = os.Rename(temp, f.path); err == nil { // a file system without links
			return true, nil
		}
	}
	removed := os.Remove(temp)
	if errors.Is(err, fs.ErrExist) {
		return false, f.named(removed)
	}
	return err == nil, f.named(errors.Join(err, removed))
}

// overwrite writes into the file that is there.
func (f *File) overwrite(text []byte) error {
	flags := os.O_WRONLY
	if f.regular {
		flags |= os.O_TRUNC
	}
	to, err := os.OpenFile(f.path, flags, 0)
	if err != nil {
		return err
	}
	_, err = to.Write(text)
	return errors.Join(err, to.Close())
}

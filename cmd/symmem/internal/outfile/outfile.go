// Package outfile writes the files that commands are asked for, whole or not at all.
package outfile

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// File is a file to be written at the end of a command. What is there stays as it is until then.
type File struct {
	path    string
	regular bool // a regular file, or one that is not there yet; anything else, such as a terminal or a pipe, is written to
	there   bool
	mode    fs.FileMode // of the file that is there
}

// Plan sees that a file can be written, without changing anything: the time to say so is before the work. A link stands for what it leads to.
func Plan(path string) (*File, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		f := &File{path: path, regular: true}
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
	f := &File{path: path, regular: info.Mode().IsRegular(), there: true, mode: info.Mode().Perm()}
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
	return errors.Join(temp.Close(), os.Remove(temp.Name()))
}

// create makes a file beside the one that is to be written.
func (f *File) create() (*os.File, error) {
	return os.OpenFile(filepath.Join(filepath.Dir(f.path), ".symmem-"+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
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
	temp, err := f.create()
	if err != nil {
		if f.there && errors.Is(err, fs.ErrPermission) {
			return f.overwrite(text)
		}
		return err
	}
	_, err = temp.Write(text)
	if err == nil && f.there {
		err = temp.Chmod(f.mode)
	}
	if err == nil {
		err = temp.Sync()
	}
	if err = errors.Join(err, temp.Close()); err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	if err := os.Rename(temp.Name(), f.path); err != nil {
		if removed := os.Remove(temp.Name()); !f.there || removed != nil {
			return errors.Join(err, removed)
		}
		return f.overwrite(text)
	}
	return nil
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

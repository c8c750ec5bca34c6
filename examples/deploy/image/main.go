// Image makes a container image from nothing: a program, folders that it needs, and the shared libraries that both link against, from this machine.
// It needs no daemon and no base image, and the same files give the same image.
package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func main() {
	log.SetFlags(0)
	program := flag.String("program", "", "the program to run, which is /symmem in the image")
	output := flag.String("output", "image.tar", "file to write the image to")
	tag := flag.String("tag", "registry.example.com/symmem:latest", "name of the image in the file")
	trees := map[string]string{}
	flag.Func("tree", "FOLDER=PATH, a folder of this machine and where it is in the image; may be given again", func(text string) error {
		i := strings.LastIndex(text, "=/") // the folder may have a = in its name
		if i < 1 {
			return errors.New("FOLDER=/PATH is allowed")
		}
		trees[path.Clean(text[i+1:])] = text[:i]
		return nil
	})
	flag.Parse()
	if *program == "" || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	missing, err := write(*output, *tag, *program, trees)
	if err != nil {
		log.Fatal(err)
	}
	for _, name := range missing {
		log.Printf("left to the container runtime, as it is not on this machine: %s", name)
	}
}

// write makes the image and returns the libraries that are wanted and not there.
func write(output, tag, program string, trees map[string]string) (missing []string, err error) {
	files := map[string]string{"/symmem": program} // by path in the image
	for at, folder := range trees {
		if err := addTree(files, at, folder); err != nil {
			return nil, err
		}
	}
	if missing, err = addLibraries(files); err != nil {
		return nil, err
	}
	layer, err := layerOf(files)
	if err != nil {
		return nil, err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil })
	if err != nil {
		return nil, err
	}
	image, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{Entrypoint: []string{"/symmem"}, User: "65532:65532", WorkingDir: "/"}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return nil, err
	}
	ref, err := name.NewTag(tag)
	if err != nil {
		return nil, err
	}
	return missing, tarball.WriteToFile(output, ref, image)
}

// addTree adds the files of a folder, and what its links lead to, in their place.
func addTree(files map[string]string, at, folder string) error {
	return filepath.WalkDir(folder, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(folder, file)
		if err != nil {
			return err
		}
		info, err := os.Stat(file)
		if err != nil {
			return err
		}
		if info.Mode().IsRegular() {
			files[path.Join(at, filepath.ToSlash(relative))] = file
		}
		return nil
	})
}

// systemFolders are where the loader looks without being told, in this order.
var systemFolders = map[string][]string{
	"amd64": {"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"},
	"arm64": {"/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"},
}[runtime.GOARCH]

// addLibraries adds the loaders and the shared libraries that the files want, and those that these want, and returns those that are nowhere. What
// stands in a tree, at a place that only the library's own search path may name, is taken to be found by it.
func addLibraries(files map[string]string) (missing []string, err error) {
	inTrees := map[string]bool{}
	for at := range files {
		inTrees[path.Base(at)] = true
	}
	absent := map[string]bool{}
	for todo := slices.Sorted(maps.Keys(files)); len(todo) > 0; todo = todo[1:] {
		wanted, err := wants(files[todo[0]])
		if err != nil {
			return nil, fmt.Errorf("reading what %s links against: %w", files[todo[0]], err)
		}
		for _, name := range wanted {
			if inTrees[name] {
				continue
			}
			file := name
			if !path.IsAbs(name) {
				file = onSystem(name)
			}
			if file == "" {
				absent[name] = true
			} else if _, there := files[file]; !there {
				files[file] = file
				todo = append(todo, file)
			}
		}
	}
	return slices.Sorted(maps.Keys(absent)), nil
}

// onSystem returns where the loader finds a library on this machine, "" if nowhere.
func onSystem(name string) string {
	for _, folder := range systemFolders {
		if file := path.Join(folder, name); path.Base(name) == name {
			if _, err := os.Stat(file); err == nil {
				return file
			}
		}
	}
	return ""
}

// wants returns the loader, as a path, and the libraries, as names, that a file of machine code wants; nothing of another file.
func wants(file string) ([]string, error) {
	f, err := elf.Open(file)
	if err != nil {
		if format, ok := errors.AsType[*elf.FormatError](err); ok && format != nil || errors.Is(err, io.EOF) {
			return nil, nil // no machine code
		}
		return nil, err
	}
	defer f.Close()
	wanted, err := f.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			text, err := io.ReadAll(io.LimitReader(p.Open(), 4096))
			if err != nil {
				return nil, err
			}
			wanted = append(wanted, string(bytes.TrimRight(text, "\x00")))
		}
	}
	return wanted, nil
}

// layerOf returns an archive of the files, in the order of their names, with nothing in it of this machine but their contents.
func layerOf(files map[string]string) ([]byte, error) {
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	folders := map[string]bool{"/": true}
	var folder func(at string) error
	folder = func(at string) error {
		if folders[at] {
			return nil
		}
		folders[at] = true
		if err := folder(path.Dir(at)); err != nil {
			return err
		}
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(at, "/") + "/", Mode: 0o755, Format: tar.FormatPAX})
	}
	for _, at := range slices.Sorted(maps.Keys(files)) {
		if err := folder(path.Dir(at)); err != nil {
			return nil, err
		}
		content, err := os.ReadFile(files[at])
		if err != nil {
			return nil, err
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(at, "/"), Mode: 0o755, Size: int64(len(content)), Format: tar.FormatPAX}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	return archive.Bytes(), w.Close()
}

package tuning

import (
	"embed"
	"fmt"
	"path"
	"sync"
)

//go:embed tables/*.json
var files embed.FS

// shipped reads the tables that come with this package, once.
var shipped = sync.OnceValue(func() []*Table {
	entries, err := files.ReadDir("tables")
	if err != nil {
		panic(err) // it is in the program
	}
	var all []*Table
	for _, e := range entries {
		name := path.Join("tables", e.Name())
		text, err := files.ReadFile(name)
		if err != nil {
			panic(err)
		}
		t, err := Parse("shipped "+name, text)
		if err != nil {
			panic(err) // a test reads them all
		}
		t.Name = fmt.Sprintf("the shipped table of %s (%s)", t.Devices[0], t.Date)
		if t.Devices[0] == AnyDevice {
			t.Name = fmt.Sprintf("the shipped table for links of kind %s (%s)", t.Link, t.Date)
		}
		all = append(all, t)
	}
	return all
})

// Shipped returns the table that comes with this package for a device behind links of a kind; nil if there is none. "" stands for links of which nothing
// is known.
func Shipped(device, link string) *Table {
	for _, t := range shipped() {
		if t.For(device, link) {
			return t
		}
	}
	return nil
}

// AllShipped returns every table that comes with this package. They are not to be changed.
func AllShipped() []*Table { return shipped() }

// reference is the GPU whose table serves where nothing is known, and nothing was measured.
const reference = "NVIDIA H200"

// Default returns the tables of a memory whose ranks have agreed on none: those of the CPU, or those of the H200 for GPUs of any kind.
func Default(host bool) *Set {
	if host {
		return &Set{Tables: []*Table{Shipped("", LinkHost)}}
	}
	return &Set{Tables: []*Table{Shipped(reference, LinkNVLink)}}
}

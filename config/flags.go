package config

import (
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"github.com/symmem/symmem/internal/options"
)

// flagMark annotates the flags that AddFlags made, so that Load never takes a program's own flag of the same name for one.
const flagMark = "symmem-key"

// configFlag names the flag that gives the path of the configuration file.
const configFlag = "config"

// AddFlags adds a flag for each of [Keys] (--backend, --world-size and so on) and --config for the path of the configuration file.
// Give the same set to [Load] after it was parsed. A name that fs already has is left alone: it stays the program's own flag
// and sets nothing here.
func AddFlags(fs *pflag.FlagSet) {
	defaults := Default()
	for _, s := range specs {
		if fs.Lookup(s.name) != nil {
			continue
		}
		switch value := s.value(&defaults).(type) {
		case bool:
			fs.Bool(s.name, value, s.usage)
		case int:
			number := decimal(value)
			fs.Var(&number, s.name, s.usage)
		case string:
			fs.String(s.name, value, s.usage)
		case []string:
			fs.StringSlice(s.name, value, s.usage)
		case time.Duration:
			fs.Duration(s.name, value, s.usage)
		case Secret:
			fs.String(s.name, "", s.usage)
		}
		mark(fs, s.name)
	}
	for _, d := range options.All() {
		if fs.Lookup(d.Key()) == nil {
			fs.String(d.Key(), d.Default, optionKey(d).Usage)
			mark(fs, d.Key())
		}
	}
	if fs.Lookup(configFlag) == nil {
		fs.String(configFlag, "", "path of the configuration file; empty takes "+defaultFile+" if it is there")
		mark(fs, configFlag)
	}
}

// decimal is the value of a flag for a whole number. That of package pflag takes 010 for 8.
type decimal int

func (d *decimal) Set(text string) error {
	n, err := wholeNumber(text)
	if err == nil {
		*d = decimal(n)
	}
	return err
}

func (d *decimal) String() string { return strconv.Itoa(int(*d)) }

// Type is that of pflag's own, so that GetInt and viper know it.
func (d *decimal) Type() string { return "int" }

// mark notes that this package made the flag.
func mark(fs *pflag.FlagSet, name string) {
	flag := fs.Lookup(name)
	flag.Annotations = map[string][]string{flagMark: {name}}
}

// setFlag returns the flag that AddFlags made for name, if the user set it, or else nil.
func setFlag(fs *pflag.FlagSet, name string) *pflag.Flag {
	if fs == nil {
		return nil
	}
	flag := fs.Lookup(name)
	if flag == nil || !flag.Changed || flag.Annotations[flagMark] == nil {
		return nil
	}
	return flag
}

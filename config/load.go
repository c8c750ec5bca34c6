package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/options"
)

const (
	defaultFile = "symmem.yaml"             // looked for in the working directory
	fileEnv     = envPrefix + "CONFIG"      // names the file; no key
	testPrefix  = envPrefix + "TEST_"       // begins the variables that tests use; no keys
	maxFile     = 1 << 20                   // bytes of a configuration file
	kubernetes  = "KUBERNETES_SERVICE_HOST" // set in every pod
)

// LoadOptions says where [Load] looks. The zero LoadOptions looks into the environment and for symmem.yaml.
type LoadOptions struct {
	// File is the path of the configuration file, which must exist; "" asks --config, then SYMMEM_CONFIG, then looks for
	// symmem.yaml, which only this user and root may write.
	File string
	// Flags is a parsed set of flags that AddFlags has extended; nil has none.
	Flags *pflag.FlagSet
	// Environ returns the environment as "NAME=value"; nil is os.Environ.
	Environ func() []string
	// Explicit holds values that win over all others, by key. A value has the type of its field or any form that a file
	// may have; nil counts as not given.
	Explicit map[string]any
	// Foreign lets variables and keys of the file that may be options of backends that are not in this program pass, unread: they are for
	// the programs that this one starts.
	Foreign bool
}

// Load puts the settings together from all sources, as the package comment says, and validates them. Nil options are the zero
// LoadOptions. It reads the environment and at most one file, and keeps neither. All that is wrong is in one error, as in
// [Config.Validate]; unknown names are in it too, and are ErrInvalid. So is a symmem.yaml that was not named and that others than this user and root
// may have written. A file that cannot be read is the error of the operating system, os.ErrNotExist if one was named that is not there.
func Load(opts *LoadOptions) (Config, error) {
	if opts == nil {
		opts = &LoadOptions{}
	}
	env, envErr := environment(opts.Environ, opts.Foreign)
	path, file, fileErr := configFile(opts, env)

	// Viper's own reading of the environment knows only the process's; the variables are laid over the file instead, which
	// gives them the same rank: below flags, above the file.
	v := viper.New()
	sources := map[string]Source{}
	settings := map[string]any{}
	defaults := Default()
	for _, s := range specs {
		v.SetDefault(s.name, s.value(&defaults))
		if value := file[s.name]; value != nil {
			settings[s.name], sources[s.name] = plain(s, value), Source{File: path}
		}
		if value := env[s.env()]; value != "" {
			settings[s.name], sources[s.name] = value, Source{Env: s.env()}
		}
		if flag := setFlag(opts.Flags, s.name); flag != nil {
			sources[s.name] = Source{Flag: "--" + s.name}
			if err := v.BindPFlag(s.name, flag); err != nil {
				return Config{}, fmt.Errorf("reading the flag --%s: %w", s.name, err)
			}
		}
		if value := opts.Explicit[s.name]; value != nil {
			sources[s.name] = Source{Program: true}
			v.Set(s.name, plain(s, value))
		}
	}
	if err := v.MergeConfigMap(settings); err != nil {
		return Config{}, fmt.Errorf("putting the configuration together: %w", err)
	}

	c, err := decode(v, sources, func(c *Config) (bad []error) {
		for _, d := range options.All() {
			key := d.Key()
			flagged := givenOption{source: Source{Flag: "--" + key}}
			if flag := setFlag(opts.Flags, key); flag != nil {
				flagged.value = flag.Value.String()
			}
			bad = append(bad, c.takeOption(d, sources, givenOption{Source{Program: true}, opts.Explicit[key]}, flagged,
				givenOption{Source{Env: d.Env()}, env[d.Env()]}, givenOption{Source{File: path}, file[key]}))
		}
		return bad
	})
	if err := errors.Join(envErr, fileErr, unknownKeys("the program", opts.Explicit, false), err); err != nil {
		return Config{}, err
	}
	return c, nil
}

// FromViper takes the settings from a viper that the program has filled itself, or from a part of it: v.Sub("symmem"). Keys
// that it lacks have their defaults; nil lacks all. Every value of v counts as given by the program. v is only read, and not kept. Its
// errors are those of [Config.Validate]; an unknown key is ErrInvalid too.
func FromViper(v *viper.Viper) (Config, error) {
	if v == nil {
		v = viper.New()
	}
	own := viper.New()
	sources := map[string]Source{}
	defaults := Default()
	for _, s := range specs {
		own.SetDefault(s.name, s.value(&defaults))
		// Get also finds what only AutomaticEnv knows, which Unmarshal would miss.
		if value := v.Get(s.name); value != nil {
			own.Set(s.name, plain(s, value))
			sources[s.name] = Source{Program: true}
		}
	}
	given := map[string]any{}
	for _, key := range v.AllKeys() {
		given[key] = nil
	}
	// A viper to which all flags of AddFlags were bound has this one too. Which files it reads is its own matter.
	if _, ok := given[configFlag]; ok {
		if path := v.GetString(configFlag); path != "" {
			return Config{}, errs.Advised("FromViper", "--"+configFlag, path,
				"nothing", "read the file into the viper, or use Load, which reads the file itself")
		}
		delete(given, configFlag)
	}
	c, err := decode(own, sources, func(c *Config) (bad []error) {
		for _, d := range options.All() {
			bad = append(bad, c.takeOption(d, sources, givenOption{Source{Program: true}, v.Get(d.Key())}))
		}
		return bad
	})
	if err := errors.Join(unknownKeys("the program", given, false), err); err != nil {
		return Config{}, err
	}
	return c, nil
}

// deviceKey is the key of a text that may be a number.
const deviceKey = "device"

// plain writes a device's index as text, so that "device: 2" may be written without quotes. For no other text may a number
// stand: YAML would have made 83 of a job id 0123.
func plain(s *spec, value any) any {
	if s.name == deviceKey {
		if _, isText := value.(string); !isText {
			if n, err := wholeNumber(value); err == nil {
				return strconv.Itoa(n)
			}
		}
	}
	return value
}

// environment returns the variables of this library that are not empty, and an error for those that nobody knows, foreign options aside if
// they may pass.
//
// Variables of this module's backends pass where the backend is not in the program: they are set for a whole machine, or for a job of which only
// some programs use GPUs.
func environment(environ func() []string, foreign bool) (map[string]string, error) {
	if environ == nil {
		environ = os.Environ
	}
	vars := map[string]string{}
	inPod := false
	for _, entry := range environ() {
		name, value, _ := strings.Cut(entry, "=")
		if name == kubernetes && value != "" {
			inPod = true
		}
		if strings.HasPrefix(name, envPrefix) {
			vars[name] = strings.TrimSpace(value)
		}
	}
	known := []string{fileEnv, options.CUDALibraryEnv}
	for _, k := range Keys() {
		known = append(known, k.Env)
	}
	var unknown []string
	for name, value := range vars {
		switch {
		case value == "":
			delete(vars, name)
		case slices.Contains(known, name), strings.HasPrefix(name, testPrefix), inPod && serviceLink.MatchString(name):
		case foreign && absent(name) != "", slices.Contains(elsewhere, absent(name)):
		default:
			unknown = append(unknown, name)
		}
	}
	slices.Sort(unknown)
	var all []error
	for _, name := range unknown {
		all = append(all, errs.Advised(op, "environment variable", name,
			"the names of keys behind "+envPrefix, cmp.Or(advice(name, known, func(near string) string {
				return near + " is the nearest that is known: correct it or unset it"
			}), "correct it or unset it")))
	}
	return vars, errors.Join(all...)
}

// elsewhere are the backends of this module that have variables.
var elsewhere = []string{"native", "nccl", "nixl", "nvshmem"}

// serviceLink matches what Kubernetes sets in every pod for a service called symmem or symmem-<something>.
var serviceLink = regexp.MustCompile(`_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|` +
	`PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// configFile finds and reads the configuration file. Without one it gives nothing.
func configFile(opts *LoadOptions, env map[string]string) (path string, settings map[string]any, err error) {
	path, optional := opts.File, false
	if path == "" {
		if flag := setFlag(opts.Flags, configFlag); flag != nil {
			path = flag.Value.String()
		}
	}
	if path == "" {
		path = env[fileEnv]
	}
	if path == "" {
		path, optional = defaultFile, true
	}
	data, err := readFile(path, !optional)
	if optional && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) && !visible(path)) {
		return "", nil, nil
	}
	if err != nil {
		return path, nil, fmt.Errorf("reading the configuration file: %w", err)
	}
	settings, err = parseFile(data)
	if err != nil {
		return path, nil, fmt.Errorf("reading the configuration file %s: %w", path, err)
	}
	return path, settings, unknownKeys("file "+path, settings, opts.Foreign)
}

// parseFile returns the keys, in lower case, and values of a YAML document.
func parseFile(data []byte) (map[string]any, error) {
	var doc yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	if err := decoder.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, nil // an empty file
	} else if err != nil {
		return nil, errs.Invalid(op, "the file", fmt.Sprintf("no YAML (%v)", unquoted(err)), `YAML lines of the form "key: value"`)
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errs.Invalid(op, "the file", "more than one YAML document", "one, with all keys")
	}
	top := doc.Content[0]
	if top.Kind == yaml.ScalarNode && top.Tag == "!!null" {
		return nil, nil
	}
	if top.Kind != yaml.MappingNode {
		// What is in the file is not quoted: it may be a secret whose path was given by mistake.
		return nil, errs.Invalid(op, "the file", "something else than keys and values", `YAML lines of the form "key: value"`)
	}
	// The secrets first: where one is refused nothing else of the file is quoted, which may be the same text by an alias.
	for pair := range slices.Chunk(top.Content, 2) {
		if s := lookup(strings.ToLower(pair[0].Value)); s != nil && s.secret() {
			if problem := secretProblem(pair[0], pair[1]); problem != "" {
				return nil, errs.Invalid(op, s.name, fmt.Sprintf("%s, in line %d", problem, pair[0].Line), "the text in quotes, behind the key: "+s.name+": '...'")
			}
		}
	}
	settings := make(map[string]any, len(top.Content)/2)
	for pair := range slices.Chunk(top.Content, 2) {
		key, node := strings.ToLower(pair[0].Value), pair[1]
		if pair[0].Kind != yaml.ScalarNode {
			return nil, errs.Invalid(op, "key", fmt.Sprintf("no text in line %d", pair[0].Line), "names of keys")
		}
		if _, twice := settings[key]; twice {
			return nil, errs.Invalid(op, "key", fmt.Sprintf("%s again in line %d", withoutSecret(key), pair[0].Line),
				"each key once, whatever its case")
		}
		written := node
		if node.Kind == yaml.AliasNode {
			written = node.Alias
		}
		if asWritten(key, written) {
			settings[key] = written.Value
			continue
		}
		var value any
		if err := node.Decode(&value); err != nil {
			return nil, errs.Invalid(op, withoutSecret(key), fmt.Sprintf("what YAML cannot read (%v)", unquoted(err)), "a value or a list")
		}
		settings[key] = value
	}
	return settings, nil
}

// asWritten reports whether a value is taken as the text that stands in the file, because YAML would make another of it: 8 of 010,
// 10 of 1e1, or a moment of 2026-11-23.
func asWritten(key string, value *yaml.Node) bool {
	if value.Kind != yaml.ScalarNode || value.ShortTag() == "!!null" {
		return false
	}
	if value.ShortTag() == "!!timestamp" { // a job may be called by the day
		return true
	}
	if s := lookup(key); s != nil {
		_, number := s.field(new(Config)).(*int)
		tag := value.ShortTag()
		return (tag == "!!int" || tag == "!!float") && (number || s.name == deviceKey)
	}
	return options.Lookup(key) != nil
}

// secretProblem says why a node of YAML is no way to write a secret, without its content. In YAML a text may become something else
// by its first character (an alias, an anchor, a tag, a comment), so that it would be lost, or be part of an error.
func secretProblem(key, value *yaml.Node) string {
	switch {
	case value.Kind == yaml.AliasNode:
		return "an alias"
	case value.Anchor != "":
		return "a value with an anchor"
	case value.Style&yaml.TaggedStyle != 0:
		return "a value with a tag"
	case value.Kind != yaml.ScalarNode:
		return "a list or keys and values"
	case value.Tag == "!!null":
		return "nothing, or a comment"
	case value.Style == 0 && (value.LineComment != "" || key.LineComment != ""):
		return "a text without quotes and a comment"
	}
	return ""
}

// quotation is what YAML's errors quote of a document, from the first quote to the last, for the text may have quotes in it.
var quotation = regexp.MustCompile("(?s)['`\"].*['`\"]")

// unquoted drops from an error of YAML what it quotes: it may be a secret that YAML takes for something else.
func unquoted(err error) error {
	text := err.Error()
	if clean := quotation.ReplaceAllString(text, "(…)"); clean != text {
		return errors.New(clean)
	}
	return err
}

// withoutSecret returns a key that is not known for an error. What follows the name of a secret in it is left out: it may be the
// secret, where the blank behind the colon was forgotten.
func withoutSecret(key string) string {
	for _, s := range specs {
		if rest, ok := strings.CutPrefix(key, s.name); ok && s.secret() && rest != "" {
			return s.name + redacted
		}
	}
	return key
}

// readFile returns what is in a regular file of moderate size. Other files might never end, or never begin. A file that was not named is only read
// if nobody else can have planted it.
func readFile(path string, named bool) ([]byte, error) {
	f, err := os.OpenFile(path, openFlags, 0)
	if err != nil {
		return nil, err
	}
	data, err := readOpen(f, path, named)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return data, nil
}

// visible reports whether the system says that there is a file of that name. In a working directory that this user may not search, as that in which a program of another
// user's was begun, it does not: a file there is none of this user's.
func visible(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrPermission)
}

// readOpen reads the file that was opened. It asks the file, not the path, what it is: another may be there by now.
func readOpen(f *os.File, path string, named bool) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errs.Invalid(op, "file", path, "a regular file")
	}
	if !named {
		if err := planted(path, info); err != nil {
			return nil, err
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxFile {
		return nil, errs.Invalid(op, "file", path, fmt.Sprintf("at most %d bytes", maxFile))
	}
	return data, nil
}

// unknownKeys returns an error for each key of given that does not exist, foreign options aside if they may pass.
func unknownKeys(where string, given map[string]any, foreign bool) error {
	var known []string
	for _, k := range Keys() {
		known = append(known, k.Name)
	}
	var unknown []string
	for key := range given {
		if !slices.Contains(known, key) && !(foreign && absent(key) != "") {
			unknown = append(unknown, key)
		}
	}
	slices.Sort(unknown)
	var all []error
	for _, key := range unknown {
		all = append(all, fmt.Errorf("%s: %w", where, errs.Advised(op, "key", withoutSecret(key),
			"the names of keys", advice(key, known, func(near string) string { return near + " is the nearest that is known" }))))
	}
	return errors.Join(all...)
}

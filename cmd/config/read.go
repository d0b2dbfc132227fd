package config

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// FragmentDir returns the directory with additional files for a configuration file: config.d for
// config.toml. Its files *.toml are read in lexical order.
func FragmentDir(file string) string { return strings.TrimSuffix(file, ".toml") + ".d" }

// loading is a configuration that is read from files.
type loading struct {
	config   *Config
	origins  map[string]string // by key: "config.toml: line 3"
	last     string            // name of the last file
	warnings []string
}

// addFiles reads a configuration file and the files of its directory. required is whether the file
// must exist.
func (l *loading) addFiles(name string, required bool) error {
	l.last = name
	content, err := os.ReadFile(name)
	switch {
	case err == nil:
		if err := l.add(name, content); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist) || required:
		return fmt.Errorf("read configuration: %w", err)
	}
	fragments, err := filepath.Glob(filepath.Join(globEscape(FragmentDir(name)), "*.toml")) // sorted
	if err != nil {
		return fmt.Errorf("list additional configuration files: %w", err)
	}
	for _, fragment := range fragments {
		content, err := os.ReadFile(fragment)
		if err != nil {
			return fmt.Errorf("read configuration: %w", err)
		}
		if err := l.add(fragment, content); err != nil {
			return err
		}
	}
	return nil
}

// globEscape returns a pattern that matches only path.
func globEscape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// where returns the place of an option for error texts: "config.toml: line 3: root".
func (l *loading) where(key string) string {
	if origin, ok := l.origins[key]; ok {
		return origin + ": " + key
	}
	return l.last + ": " + key
}

// add reads a file's content into the configuration.
func (l *loading) add(name string, content []byte) error {
	l.last = name
	var tree map[string]any
	if err := toml.Unmarshal(content, &tree); err != nil {
		return syntaxError(name, err)
	}
	f := &file{name: name, lines: lines(content), loading: l, set: map[string]string{}}
	f.table(tree, "")
	for _, err := range f.inOrder(f.obsolete) {
		l.warnings = append(l.warnings, err.Error())
	}
	return errors.Join(f.inOrder(f.problems)...)
}

// inOrder returns problems with the file and their lines, sorted by line.
func (f *file) inOrder(problems []problem) (all []error) {
	slices.SortStableFunc(problems, func(a, b problem) int { return cmp.Compare(a.line, b.line) })
	for _, p := range problems {
		all = append(all, fmt.Errorf("%s: line %d: %w", f.name, p.line, p.err))
	}
	return all
}

func syntaxError(name string, err error) error {
	var wrong *toml.DecodeError
	if !errors.As(err, &wrong) {
		return fmt.Errorf("%s: %w", name, err)
	}
	line, column := wrong.Position()
	return fmt.Errorf("%s: line %d, column %d: %w", name, line, column, wrong)
}

// lines returns the line of each key and table header, by its full dotted key.
func lines(content []byte) map[string]int {
	found := map[string]int{}
	var parser unstable.Parser
	parser.Reset(content)
	var table []string // of the following keys
	for parser.NextExpression() {
		e := parser.Expression()
		if e.Kind != unstable.KeyValue && e.Kind != unstable.Table && e.Kind != unstable.ArrayTable {
			continue
		}
		key, line := keyOf(e, &parser)
		if e.Kind == unstable.KeyValue {
			key = append(slices.Clone(table), key...)
		} else {
			table = key
		}
		full := strings.Join(key, ".")
		if found[full] == 0 {
			found[full] = line
		}
	}
	return found
}

// keyOf returns the parts of an expression's key, and its line.
func keyOf(e *unstable.Node, parser *unstable.Parser) (parts []string, line int) {
	for key := e.Key(); key.Next(); {
		if parts == nil {
			line = parser.Shape(key.Node().Raw).Start.Line
		}
		parts = append(parts, string(key.Node().Data))
	}
	return parts, line
}

// file is one file that is read into a configuration.
type file struct {
	*loading
	name     string
	lines    map[string]int
	set      map[string]string // options that the file sets: the file's key, by the option's key
	problems []problem
	obsolete []problem // keys of release 0.2
}

type problem struct {
	line int
	err  error
}

// line returns the line of a key, or of the inline table that contains it.
func (f *file) line(key string) int {
	for {
		if line, ok := f.lines[key]; ok {
			return line
		}
		// A header [a.b] also creates the table a.
		for full, line := range f.lines {
			if strings.HasPrefix(full, key+".") {
				return line
			}
		}
		i := strings.LastIndexByte(key, '.')
		if i < 0 {
			return 1
		}
		key = key[:i]
	}
}

func (f *file) refuse(key string, format string, args ...any) {
	f.problems = append(f.problems, problem{f.line(key), fmt.Errorf(format, args...)})
}

// removed are options of earlier versions that no option replaces, and what to do instead.
var removed = map[string]string{
	"checkpoint.restore_foreign": "remove it. Checkpoints of other nodes are restored if they have the same checkpoint.key; " +
		"see checkpoint.restore",
	"network.check_source": noCheckOfSources,
	"network_check_source": noCheckOfSources,
	"network.isolation":    noIsolation,
	"network_isolation":    noIsolation,
}

const (
	noCheckOfSources = "remove it. Drop the capability NET_RAW from pods, or use a network plugin that checks their " +
		"source addresses"
	noIsolation = "remove it. Block traffic by nftables rules of your own, or use a network plugin with NetworkPolicy"
)

// removedValues are values of options that earlier versions had, and what to do instead.
var removedValues = map[string]map[string]string{
	"lazy.policy": {
		"indexed": `use "on", which also uses tables of contents that the manifest names`,
		"all":     `use "on". Indexes of other nodes are not used any more`,
	},
}

// table sets the options in a table of the file. prefix is the table's key with a dot, or empty.
func (f *file) table(values map[string]any, prefix string) {
	for name, value := range values {
		key := prefix + name
		content, isTable := value.(map[string]any)
		if i := slices.IndexFunc(tables(), func(t table) bool { return t.Key == key }); i >= 0 {
			f.namedTables(tables()[i], value)
			continue
		}
		if isTable && isGroup(key) {
			f.table(content, key+".")
			continue
		}
		i := slices.IndexFunc(options(), func(o option) bool { return o.Key == key || o.Old == key })
		switch {
		case removed[key] != "":
			f.refuse(key, "%s is no longer an option: %s", key, removed[key])
		case i < 0 && isGroup(key):
			f.refuse(key, "%s is a table with the options %s", key, strings.Join(keysBelow(key), ", "))
		case i < 0:
			f.refuse(key, "unknown key %q, the nearest option is %q", key, nearest(key))
		case isTable:
			f.refuse(key, "%s takes a value and is not a table", key)
		default:
			f.option(options()[i], key, value)
		}
	}
}

// option sets an option. key is the key in the file, which may be obsolete.
func (f *file) option(o option, key string, value any) {
	if other, ok := f.set[o.Key]; ok {
		f.refuse(key, "%s and %s (line %d) set the same option", key, other, f.line(other))
		return
	}
	f.set[o.Key] = key
	texts, err := o.texts(value)
	if err == nil {
		err = o.set(fields(f.config), texts)
	}
	if err != nil {
		f.refuse(key, "%s: %w", key, err)
		return
	}
	f.place(o.Key, key)
	if key != o.Key {
		f.obsolete = append(f.obsolete, problem{f.line(key), fmt.Errorf("%s is now %s", key, o.Key)})
	}
}

// place records the origin of an option.
func (f *file) place(option, key string) {
	if f.origins == nil {
		f.origins = map[string]string{}
	}
	f.origins[option] = fmt.Sprintf("%s: line %d", f.name, f.line(key))
}

// namedTables sets the entries of a table whose keys users choose. An entry replaces the whole
// entry of an earlier file.
func (f *file) namedTables(t table, value any) {
	const form = "%s: it takes tables of the form [%s.NAME] with values in them"
	entries, ok := value.(map[string]any)
	if !ok {
		f.refuse(t.Key, form, t.Key, t.Key)
		return
	}
	all := fields(f.config).FieldByIndex(t.field.Index)
	if all.IsNil() {
		all.Set(reflect.MakeMap(all.Type()))
	}
	for name, value := range entries {
		key := t.Key + "." + name
		values, ok := value.(map[string]any)
		if !ok {
			at := t.Key
			if _, found := f.lines[key]; found {
				at = key
			}
			f.refuse(key, form, at, t.Key)
			continue
		}
		entry := reflect.New(t.field.Type.Elem()).Elem() // values in a map are not addressable
		f.entry(t, key, values, entry)
		f.place(key, key)
		all.SetMapIndex(reflect.ValueOf(name), entry)
	}
}

func (f *file) entry(t table, key string, values map[string]any, entry reflect.Value) {
	for name, value := range values {
		full := key + "." + name
		i := slices.IndexFunc(t.Options, func(o option) bool { return o.Key == name })
		if _, isTable := value.(map[string]any); isTable && i < 0 {
			f.refuse(full, "%s: it takes tables of the form [%s.NAME] with values in them", full, t.Key)
			continue
		}
		if i < 0 {
			f.refuse(full, "unknown key %q, the nearest option is %q", full, nearestOf(name, keysOf(t.Options)))
			continue
		}
		texts, err := t.Options[i].texts(value)
		if err == nil {
			err = t.Options[i].set(entry, texts)
		}
		if err != nil {
			f.refuse(full, "%s: %w", full, err)
			continue
		}
		f.place(full, full)
	}
}

// texts returns a TOML value as arguments of set. It refuses values of another type than the
// option's. "1" is not a number, and 60 is not a duration, because it has no unit.
func (o option) texts(value any) ([]string, error) {
	wrong := fmt.Errorf("it takes a %s, found %s", o.typeText(), kindOf(value))
	switch v := value.(type) {
	case string:
		if o.typeName() == "string" || o.typeName() == "duration" {
			return []string{v}, nil
		}
	case bool:
		if o.typeName() == "boolean" {
			return []string{fmt.Sprint(v)}, nil
		}
	case int64:
		if o.typeName() == "number" {
			return []string{fmt.Sprint(v)}, nil
		}
	case []any:
		if !o.isList() {
			return nil, wrong
		}
		texts := make([]string, len(v))
		for i, element := range v {
			text, ok := element.(string)
			if !ok {
				return nil, fmt.Errorf("element %d of the list is not a string, found %s", i+1, kindOf(element))
			}
			texts[i] = text
		}
		return texts, nil
	}
	return nil, wrong
}

// kindOf names the type of a TOML value.
func kindOf(value any) string {
	switch value.(type) {
	case string:
		return "string"
	case bool:
		return "boolean"
	case int64:
		return "integer"
	case float64:
		return "float"
	case []any:
		return "array"
	case map[string]any:
		return "table"
	default:
		return "date or time"
	}
}

package config

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Duration is a duration in the form "1m30s". It is a struct so that TOML's bare numbers, which
// have no unit, do not convert to it.
type Duration struct{ time.Duration }

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a duration like \"1m30s\"", text)
	}
	d.Duration = v
	return nil
}

// String returns the shortest form: "1m", not "1m0s".
func (d Duration) String() string {
	s := d.Duration.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// option describes a field of Config, or of one of its tables, by the field's tags.
type option struct {
	Key, Old, Flag, Doc string // Key: table and key, separated by dots
	Default             string // in a flag's form, lists separated by commas
	Reload              bool   // a running daemon can take a new value

	field reflect.StructField
	path  string   // "", "abs", "optional" or "socket"
	oneof []string // allowed values, if not empty
	min   string   // smallest number or duration, if not empty
	max   string   // largest number, if not empty
}

// options are the options of Config itself, in the order of its fields.
var options = sync.OnceValue(func() []option {
	var all []option
	for field := range reflect.TypeFor[Config]().Fields() {
		if !isTables(field) {
			all = append(all, newOption(field))
		}
	}
	return all
})

func newOption(field reflect.StructField) option {
	tag := field.Tag
	o := option{
		Key: tag.Get("key"), Old: tag.Get("old"), Reload: tag.Get("reload") == "true",
		Flag: tag.Get("flag"), Doc: tag.Get("doc"), Default: tag.Get("default"),
		field: field, path: tag.Get("path"), min: tag.Get("min"), max: tag.Get("max"),
	}
	if s := tag.Get("oneof"); s != "" {
		o.oneof = strings.Split(s, ",")
	}
	return o
}

// value returns the option's value in a struct: a Config, or an entry of a table.
func (o option) value(of reflect.Value) reflect.Value { return of.FieldByIndex(o.field.Index) }

// pointer returns a pointer to the value, for a type switch.
func (o option) pointer(of reflect.Value) any { return o.value(of).Addr().Interface() }

func (o option) isList() bool {
	return o.field.Type.Kind() == reflect.Slice
}

// defaults returns the default as arguments of set.
func (o option) defaults() []string {
	if o.isList() && o.Default == "" {
		return []string{}
	}
	if o.isList() {
		return strings.Split(o.Default, ",")
	}
	return []string{o.Default}
}

// set parses a value from texts. A list gets all texts as elements. Another option gets the last
// text.
func (o option) set(of reflect.Value, texts []string) error {
	last := ""
	if len(texts) > 0 {
		last = texts[len(texts)-1]
	}
	switch p := o.pointer(of).(type) {
	case *string:
		*p = last
	case *[]string:
		*p = slices.Clone(texts)
	case *bool:
		if last != "true" && last != "false" {
			return fmt.Errorf("%q is neither true nor false", last)
		}
		*p = last == "true"
	case *int:
		n, err := strconv.Atoi(last)
		if err != nil {
			return fmt.Errorf("%q is not a whole number", last)
		}
		*p = n
	case *Duration:
		return p.UnmarshalText([]byte(last))
	default:
		panic(fmt.Sprintf("config: option %s has type %T", o.Key, p))
	}
	return nil
}

// typeName returns the name of the type in the documentation.
func (o option) typeName() string {
	switch reflect.New(o.field.Type).Interface().(type) {
	case *[]string:
		return "list of strings"
	case *bool:
		return "boolean"
	case *int:
		return "number"
	case *Duration:
		return "duration"
	default:
		return "string"
	}
}

// typeText returns the expected type for an error text.
func (o option) typeText() string {
	if name := o.typeName(); name != "duration" {
		return name
	}
	return `duration like "1m30s"`
}

// group returns the option's table, or "" for a top-level option, and its key in the table.
func (o option) group() (table, key string) { return cut(o.Key) }

// usage returns the first sentence of the documentation for the list of flags. `berth config
// default` and docs/config.md have the whole documentation.
func (o option) usage() string {
	doc, _, _ := strings.Cut(o.Doc, ". ")
	doc = strings.TrimSuffix(doc, ".")
	if o.isList() {
		doc += " (several times, or with commas)"
	}
	return doc
}

// flagType names the value of the option's flag.
func (o option) flagType() string {
	switch {
	case o.path != "":
		return "path"
	case len(o.oneof) > 0:
		return strings.Join(o.oneof, "|")
	}
	return "text"
}

// flagValue collects the values of one flag. They go into a Config after the file was read.
type flagValue struct {
	option option
	texts  []string
}

// Set implements pflag.Value.
func (f *flagValue) Set(text string) error {
	texts := []string{text}
	if f.option.isList() {
		texts = strings.Split(text, ",")
	}
	if err := f.option.set(fields(new(Config)), texts); err != nil {
		return err
	}
	f.texts = append(f.texts, texts...)
	return nil
}

// String implements pflag.Value. pflag shows it as the default.
func (f *flagValue) String() string {
	if f.texts == nil {
		return f.option.Default
	}
	return strings.Join(f.texts, ",")
}

// Type implements pflag.Value.
func (f *flagValue) Type() string { return f.option.flagType() }

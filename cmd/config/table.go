package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
)

// table is a field of Config that is a map of structs, whose keys users choose.
type table struct {
	Key, Doc, Example string
	Options           []option // of each entry
	Reload            bool     // a running daemon can take new entries

	field reflect.StructField
}

// tables are the tables of Config, in the order of its fields.
var tables = sync.OnceValue(func() []table {
	var all []table
	for field := range reflect.TypeFor[Config]().Fields() {
		if !isTables(field) {
			continue
		}
		t := table{Key: field.Tag.Get("key"), Doc: field.Tag.Get("doc"), Example: field.Tag.Get("example"), field: field}
		t.Reload = field.Tag.Get("reload") == "true"
		for f := range field.Type.Elem().Fields() {
			t.Options = append(t.Options, newOption(f))
		}
		all = append(all, t)
	}
	return all
})

func isTables(field reflect.StructField) bool { return field.Type.Kind() == reflect.Map }

// check sets the defaults of all entries of the table in c, validates them, and cleans their paths.
func (t table) check(c *Config, where func(key string) string) []error {
	entries := fields(c).FieldByIndex(t.field.Index)
	var all []error
	for _, name := range sortedKeys(entries) {
		entry := reflect.New(t.field.Type.Elem()).Elem() // values in a map are not addressable
		entry.Set(entries.MapIndex(name))
		for _, o := range t.Options {
			if o.Default != "" && o.value(entry).IsZero() {
				if err := o.set(entry, o.defaults()); err != nil {
					all = append(all, err)
				}
			}
			if err := o.check(entry); err != nil {
				all = append(all, fmt.Errorf("%s: %w", where(t.Key+"."+name.String()+"."+o.Key), err))
			}
		}
		entries.SetMapIndex(name, entry)
	}
	return all
}

// sortedKeys returns the keys of a map of strings in lexical order.
func sortedKeys(m reflect.Value) []reflect.Value {
	keys := m.MapKeys()
	slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
	return keys
}

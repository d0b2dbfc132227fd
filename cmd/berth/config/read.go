package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"
)

// read records the lines of all keys. It refuses unknown keys, and values of another type than
// their option's. The decoder could do this too, but it would accept "Root" beside "root", and its
// errors about types are for Go programmers. Syntax errors are left to the decoder.
func (p places) read(content []byte) error {
	var all []error
	var parser unstable.Parser
	parser.Reset(content)
	var within []string // the table of the following keys
	skip := false       // the table was refused
	for parser.NextExpression() {
		e := parser.Expression()
		if e.Kind != unstable.KeyValue && e.Kind != unstable.Table && e.Kind != unstable.ArrayTable {
			continue
		}
		key, line := keyOf(e, &parser)
		if e.Kind != unstable.KeyValue {
			within, skip = key, false
		} else {
			key = append(slices.Clone(within), key...)
		}
		if skip {
			continue
		}
		if err := check(e, key); err != nil {
			all = append(all, fmt.Errorf("%s: line %d: %w", p.name, line, err))
			skip = e.Kind != unstable.KeyValue
			continue
		}
		p.lines[strings.Join(key, ".")] = line
	}
	return errors.Join(all...)
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

// check returns an expression's error. Its full key, including tables, is key.
func check(e *unstable.Node, key []string) error {
	if i := slices.IndexFunc(tables(), func(t table) bool { return t.Key == key[0] }); i >= 0 {
		return tables()[i].checkKey(e, key)
	}
	i := slices.IndexFunc(options(), func(o option) bool { return o.Key == key[0] })
	if i < 0 {
		return unknown(key[0], key[0], keys())
	}
	if e.Kind != unstable.KeyValue || len(key) > 1 {
		return fmt.Errorf("%s takes a value and is not a table", key[0])
	}
	return options()[i].checkKind(e, key[0])
}

// checkKey checks an expression in one of the tables.
func (t table) checkKey(e *unstable.Node, key []string) error {
	switch {
	case e.Kind == unstable.Table && len(key) == 2:
		return nil
	case e.Kind != unstable.KeyValue || len(key) != 3:
		return fmt.Errorf("%s: it takes tables of the form [%s.NAME] with values in them", strings.Join(key, "."), t.Key)
	}
	full := strings.Join(key, ".")
	i := slices.IndexFunc(t.Options, func(o option) bool { return o.Key == key[2] })
	if i < 0 {
		return unknown(full, key[2], keysOf(t.Options))
	}
	return t.Options[i].checkKind(e, full)
}

func (o option) checkKind(e *unstable.Node, key string) error {
	if e.Value().Kind != o.kind() {
		return fmt.Errorf("%s takes a %s, found %s", key, o.wants(), strings.ToLower(e.Value().Kind.String()))
	}
	return nil
}

func unknown(key, name string, known []string) error {
	return fmt.Errorf("unknown key %q, the nearest option is %q", key, nearest(name, known))
}

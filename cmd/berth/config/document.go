package config

import (
	"fmt"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// DefaultTOML returns a configuration file with every option at its default and
// its documentation as a comment.
func DefaultTOML() string {
	c := Default()
	var b strings.Builder
	b.WriteString("# Configuration of berth. A flag of \"berth serve\" wins over this file.\n")
	for _, o := range options() {
		b.WriteString("\n")
		for _, line := range wrap(o.summary(), 98) {
			b.WriteString("# " + line + "\n")
		}
		b.WriteString(o.assignment(c) + "\n")
	}
	for _, t := range tables() {
		b.WriteString("\n")
		for _, line := range wrap("["+t.Key+".NAME]: "+t.Doc, 98) {
			b.WriteString("# " + line + "\n")
		}
		fmt.Fprintf(&b, "#\n# [%s.%s]\n", t.Key, t.Example)
		for _, o := range t.Options {
			for _, line := range wrap(o.summary(), 96) {
				b.WriteString("#   # " + line + "\n")
			}
			b.WriteString("#   " + o.example() + "\n")
		}
	}
	return b.String()
}

// Reference returns docs/config.md.
func Reference() string {
	c := Default()
	var b strings.Builder
	b.WriteString(`# Configuration reference

Generated from cmd/berth/config by ` + "`go test ./cmd/berth/config -run Reference -update`" + `; do not edit.

` + "`berth serve` reads `" + DefaultPath + "`" + `, or the file that --config names. A flag wins over the
file, the file wins over the default. Keys that are no option are refused.
` + "`berth config default`" + ` prints a file with every option.

`)
	for _, o := range options() {
		o.describe(&b, "##", o.Key)
		fmt.Fprintf(&b, "- default: `%s`\n", o.assignment(c))
		if o.Flag != "" {
			fmt.Fprintf(&b, "- flag: `--%s`%s\n", o.Flag, o.repeatable())
		}
		b.WriteString("\n")
	}
	for _, t := range tables() {
		fmt.Fprintf(&b, "## [%s.NAME]\n\n%s\n\n", t.Key, t.Doc)
		for _, o := range t.Options {
			o.describe(&b, "###", t.Key+".NAME."+o.Key)
			fmt.Fprintf(&b, "- example: `%s`\n\n", o.example())
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// describe writes what the reference has of every option.
func (o option) describe(b *strings.Builder, heading, key string) {
	fmt.Fprintf(b, "%s %s\n\n%s\n\n- type: %s\n", heading, key, o.Doc, o.typeName())
	if len(o.oneof) > 0 {
		fmt.Fprintf(b, "- values: %s\n", strings.Join(o.oneof, ", "))
	}
	if o.min != "" {
		fmt.Fprintf(b, "- at least: %s\n", o.min)
	}
	if o.max != "" {
		fmt.Fprintf(b, "- at most: %s\n", o.max)
	}
}

// example is an option of a table with the value that the documentation shows.
func (o option) example() string { return o.Key + " = " + o.field.Tag.Get("example") }

func (o option) repeatable() string {
	if o.isList() {
		return ", several times or with commas"
	}
	return ""
}

// summary is the documentation with allowed values and flag.
func (o option) summary() string {
	s := o.Doc
	if len(o.oneof) > 0 {
		s += " One of " + strings.Join(o.oneof, ", ") + "."
	}
	if o.min != "" {
		s += " At least " + o.min + "."
	}
	if o.max != "" {
		s += " At most " + o.max + "."
	}
	if o.Flag != "" {
		s += " Flag: --" + o.Flag + o.repeatable() + "."
	}
	return s
}

// assignment is the option with its value in c as a line of TOML.
func (o option) assignment(c *Config) string {
	text, err := toml.Marshal(map[string]any{o.Key: o.value(fields(c)).Interface()})
	if err != nil {
		panic(fmt.Sprintf("config: %s as TOML: %v", o.Key, err)) // strings, numbers and lists of strings always encode
	}
	return strings.TrimSpace(string(text))
}

// wrap splits text into lines of at most width bytes, where words allow it.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case len(line)+1+len(word) > width:
			lines = append(lines, line)
			line = word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}

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
	return b.String()
}

// Reference returns docs/config.md.
func Reference() string {
	c := Default()
	var b strings.Builder
	b.WriteString(`# Configuration reference

Generated from internal/config by ` + "`go test ./internal/config -run Reference -update`" + `; do not edit.

` + "`berth serve` reads `" + DefaultPath + "`" + `, or the file that --config names. A flag wins over the
file, the file wins over the default. Keys that are no option are refused.
` + "`berth config default`" + ` prints a file with every option.

`)
	for _, o := range options() {
		fmt.Fprintf(&b, "## %s\n\n", o.Key)
		fmt.Fprintf(&b, "%s\n\n", o.Doc)
		fmt.Fprintf(&b, "- type: %s\n", o.typeName())
		if len(o.oneof) > 0 {
			fmt.Fprintf(&b, "- values: %s\n", strings.Join(o.oneof, ", "))
		}
		if o.min != "" {
			fmt.Fprintf(&b, "- at least: %s\n", o.min)
		}
		fmt.Fprintf(&b, "- default: `%s`\n", o.assignment(c))
		if o.Flag != "" {
			fmt.Fprintf(&b, "- flag: `--%s`%s\n", o.Flag, o.repeatable())
		}
		b.WriteString("\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}

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
	if o.Flag != "" {
		s += " Flag: --" + o.Flag + o.repeatable() + "."
	}
	return s
}

// assignment is the option with its value in c as a line of TOML.
func (o option) assignment(c *Config) string {
	text, err := toml.Marshal(map[string]any{o.Key: o.value(c).Interface()})
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

package config

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// groupDocs describe the tables. A table of the options that lacks an entry has no description.
var groupDocs = map[string]string{
	"log":       "The daemon's log.",
	"container": "How containers start, log and are counted.",
	"exec":      "Commands in running containers: exec sessions, probes and hooks.",
	"stream":    "Server of exec, attach and port-forward sessions.",
	"image":     "Images on disk.",
	"pull":      "Transfers of images.",
	"peers":     "Layers from other nodes.",
	"lazy":      "Images that are used before all of their content is present.",
	"registry":  "Registries and their credentials.",
	"signature": "Signatures that images must have.",
	"disk":      "Limits of disk usage.",
	"network":   "Network of pods, and the built-in network.",
	"cni":       "Networks that CNI plugins create. See network.type.",
	"devices":   "Devices of containers.",
	"nri":       "Plugins of the Node Resource Interface.",
	"metrics":   "Prometheus metrics.",
	"tracing":   "Export of OpenTelemetry spans.",
}

// DefaultTOML returns a configuration file with every option at its default, documented by
// comments.
func DefaultTOML() string {
	c := Default()
	var b strings.Builder
	b.WriteString("# Configuration of berth. Flags of berthd override this file.\n")
	for _, group := range groups() {
		if group != "" {
			fmt.Fprintf(&b, "\n# %s\n[%s]\n", groupDocs[group], group)
		}
		for _, o := range optionsIn(group) {
			b.WriteString("\n")
			for _, line := range wrap(o.summary(), 98) {
				b.WriteString("# " + line + "\n")
			}
			b.WriteString(o.assignment(c) + "\n")
		}
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

func optionsIn(group string) []option {
	var all []option
	for _, o := range options() {
		if g, _ := o.group(); g == group {
			all = append(all, o)
		}
	}
	return all
}

// TOML returns a configuration file with the options of c that differ from their defaults, or with
// all options.
func (c *Config) TOML(all bool) string {
	defaults := Default()
	var b strings.Builder
	for _, group := range groups() {
		var lines []string
		for _, o := range optionsIn(group) {
			if all || !reflect.DeepEqual(o.value(fields(c)).Interface(), o.value(fields(defaults)).Interface()) {
				lines = append(lines, o.assignment(c))
			}
		}
		writeTable(&b, group, lines)
	}
	for _, t := range tables() {
		entries := fields(c).FieldByIndex(t.field.Index)
		for _, name := range sortedKeys(entries) {
			var lines []string
			entry := reflect.New(t.field.Type.Elem()).Elem()
			entry.Set(entries.MapIndex(name))
			for _, o := range t.Options {
				if v := o.value(entry); !v.IsZero() {
					lines = append(lines, assignment(o.Key, v))
				}
			}
			writeTable(&b, t.Key+"."+name.String(), append(lines, ""))
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// writeTable writes a table with its lines and an empty line. If there are no lines, it writes
// nothing.
func writeTable(b *strings.Builder, table string, lines []string) {
	if len(lines) == 0 {
		return
	}
	if table != "" {
		fmt.Fprintf(b, "[%s]\n", table)
	}
	for _, line := range lines {
		if line != "" {
			b.WriteString(line + "\n")
		}
	}
	b.WriteString("\n")
}

// example returns the assignment of a table's option that the documentation shows.
func (o option) example() string { return o.Key + " = " + o.field.Tag.Get("example") }

func (o option) repeatable() string {
	if o.isList() {
		return ", several times or with commas"
	}
	return ""
}

// summary returns the documentation with the allowed values and the flag.
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

// assignment returns the option with its value in c as a line of its table.
func (o option) assignment(c *Config) string {
	_, key := o.group()
	return assignment(key, o.value(fields(c)))
}

func assignment(key string, value reflect.Value) string {
	text, err := toml.Marshal(map[string]any{key: value.Interface()})
	if err != nil {
		panic(fmt.Sprintf("config: %s as TOML: %v", key, err)) // strings, numbers and lists of strings always encode
	}
	return strings.TrimSpace(string(text))
}

// wrap splits text into lines of at most width bytes at blanks.
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

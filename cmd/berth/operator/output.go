package operator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/template"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
)

// output is the value of an --output flag.
type output struct {
	format   string             // one of allowed
	allowed  []string           // the first is the default
	template *template.Template // with outputTemplate
}

const (
	outputTable    = "table"
	outputWide     = "wide"
	outputJSON     = "json"
	outputYAML     = "yaml"
	outputTemplate = "go-template"
)

func (o *output) String() string { return o.format }

// Type implements pflag.Value.
func (o *output) Type() string { return strings.Join(o.allowed, "|") }

// Set takes the value from the command line. A template follows its format: go-template={{.name}}.
func (o *output) Set(s string) error {
	format, text, hasText := strings.Cut(s, "=")
	for _, allowed := range o.allowed {
		if format != allowed {
			continue
		}
		if hasText != (format == outputTemplate) {
			break
		}
		o.format = format
		if hasText {
			return o.setTemplate(text)
		}
		return nil
	}
	return fmt.Errorf("want %s", strings.ReplaceAll(strings.Join(o.allowed, ", "), outputTemplate, outputTemplate+"=TEMPLATE"))
}

// setTemplate parses a template. A missing field prints <no value>, as with kubectl.
func (o *output) setTemplate(text string) (err error) {
	o.format = outputTemplate
	o.template, err = template.New("").Funcs(template.FuncMap{"json": jsonText, "join": strings.Join}).Parse(text)
	return err
}

// jsonText is the template function json.
func jsonText(v any) (string, error) {
	text, err := json.Marshal(v)
	return string(text), err
}

// addOutputFlag adds --output with the given formats, the default first.
func addOutputFlag(cmd *cobra.Command, formats ...string) *output {
	o := &output{format: formats[0], allowed: formats}
	cmd.Flags().VarP(o, "output", "o", "output format")
	complete(cmd, "output", formats...)
	return o
}

// listFlags are the flags that all lists share.
type listFlags struct {
	out     *output
	quiet   bool
	noTrunc bool
	filters []string
}

// addListFlags adds the flags of a list. keys describes the keys of --filter.
func addListFlags(cmd *cobra.Command, keys string) *listFlags {
	l := &listFlags{out: addOutputFlag(cmd, outputTable, outputWide, outputJSON, outputYAML, outputTemplate)}
	cmd.Flags().BoolVarP(&l.quiet, "quiet", "q", false, "print only IDs")
	cmd.Flags().BoolVar(&l.noTrunc, "no-trunc", false, "print full IDs")
	cmd.Flags().StringArrayVar(&l.filters, "filter", nil, "KEY=VALUE; lines must match all filters; keys: "+keys)
	return l
}

// isTable reports whether the list is a table.
func (l *listFlags) isTable() bool {
	return !l.quiet && (l.out.format == outputTable || l.out.format == outputWide)
}

// id returns an ID as the list shows it.
func (l *listFlags) id(id string) string {
	if l.noTrunc {
		return id
	}
	return client.ShortID(id)
}

// row is one object of a list. Its JSON form is what templates and filters use.
type row interface {
	fullID() string
	// cells returns the columns of the table, and more with -o wide.
	cells(l *listFlags) []terminal.Cell
}

// cells are texts without colors.
func cells(texts ...string) (row []terminal.Cell) {
	for _, text := range texts {
		row = append(row, terminal.Cell{Text: text})
	}
	return row
}

// printList prints rows in the chosen form. wide has the titles of the additional columns of -o
// wide.
func printList[R row](w io.Writer, l *listFlags, rows []R, header, wide []string) error {
	if l.quiet {
		for _, r := range rows {
			if _, err := fmt.Fprintln(w, l.id(r.fullID())); err != nil {
				return err
			}
		}
		return nil
	}
	if !l.isTable() {
		if rows == nil {
			rows = []R{} // an empty array, not null
		}
		return printValues(w, l.out, rows)
	}
	if l.out.format == outputWide {
		header = append(header[:len(header):len(header)], wide...)
	}
	table := [][]terminal.Cell{cells(header...)}
	for _, r := range rows {
		table = append(table, r.cells(l)[:len(header)])
	}
	return terminal.Table(w, table)
}

// printValues prints values as one array, or each by the template.
func printValues[T any](w io.Writer, o *output, values []T) error {
	if o.format != outputTemplate {
		return printValue(w, o, values)
	}
	for _, v := range values {
		if err := printValue(w, o, v); err != nil {
			return err
		}
	}
	return nil
}

// printValue prints a value as JSON, as YAML or by the template, whose fields have the names of the
// JSON form.
func printValue(w io.Writer, o *output, value any) error {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(value); err != nil {
		return err
	}
	switch o.format {
	case outputYAML:
		text, err := yaml.JSONToYAML(out.Bytes())
		if err != nil {
			return err
		}
		out.Reset()
		out.Write(text)
	case outputTemplate:
		var generic any
		dec := json.NewDecoder(&out)
		dec.UseNumber() // 64-bit numbers keep their digits
		if err := dec.Decode(&generic); err != nil {
			return err
		}
		out.Reset()
		if err := o.template.Execute(&out, generic); err != nil {
			return err
		}
		out.WriteByte('\n')
	}
	_, err := w.Write(out.Bytes())
	return err
}

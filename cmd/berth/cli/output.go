package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"

	"github.com/spf13/cobra"
)

// Output is the value of a flag --output: a form for people, or JSON.
type Output struct {
	format  string
	formats []string
}

const outputJSON = "json"

// AddOutput adds --output to a command. plain names the form for people, which is the default: text
// or table.
func AddOutput(cmd *cobra.Command, plain string) *Output {
	o := new(Output)
	o.AddFlag(cmd, plain)
	return o
}

// AddFlag is AddOutput for a value that exists.
func (o *Output) AddFlag(cmd *cobra.Command, plain string) {
	*o = Output{plain, []string{plain, outputJSON}}
	cmd.Flags().VarP(o, "output", "o", "output format")
	Complete(cmd, "output", o.formats...)
}

// Complete gives a flag fixed values for the shell's completion.
func Complete(cmd *cobra.Command, flag string, values ...string) {
	// It fails only for an unknown flag.
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// JSON reports whether the output is JSON.
func (o *Output) JSON() bool { return o.format == outputJSON }

// String implements pflag.Value.
func (o *Output) String() string { return o.format }

// Type implements pflag.Value.
func (o *Output) Type() string { return strings.Join(o.formats, "|") }

// Set implements pflag.Value.
func (o *Output) Set(s string) error {
	if !slices.Contains(o.formats, s) {
		return fmt.Errorf("want %s", strings.Join(o.formats, " or "))
	}
	o.format = s
	return nil
}

// PrintJSON prints a value as indented JSON. Its texts may come from images and manifests, and the
// output may go to a terminal. So PrintJSON escapes invisible characters and marks that change the
// direction of text. These occur only in strings, where JSON allows the escapes.
func PrintJSON(w io.Writer, value any) error {
	var plain, out bytes.Buffer
	enc := json.NewEncoder(&plain)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(value); err != nil {
		return err
	}
	for _, r := range plain.String() {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			out.WriteRune(r)
		case r > math.MaxUint16:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&out, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	_, err := w.Write(out.Bytes())
	return err
}

package config

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestReferenceIsUpToDate(t *testing.T) {
	t.Parallel()
	const path = "../../docs/config.md"
	if *update {
		if err := os.WriteFile(path, []byte(reference()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != reference() {
		t.Error("docs/config.md differs from the options; run: go test ./cmd/config -run Reference -update")
	}
}

// reference returns the content of docs/config.md.
func reference() string {
	c := Default()
	var b strings.Builder
	b.WriteString(`# Configuration reference

For operators who write ` + "`" + DefaultPath + "`" + `. Do not edit this page:
` + "`go test ./cmd/config -run Reference -update`" + ` generates it.

` + "`berthd`" + ` reads this file, or the file that --config names, and then the files ` + "`*.toml`" + ` in
` + "`" + FragmentDir(DefaultPath) + "`" + ` in lexical order. Later files override earlier ones; flags override
all files. Lists are replaced as a whole. Unknown keys are errors.

- ` + "`berth config default`" + ` prints a file with every option.
- ` + "`berth config check`" + ` checks the files without a daemon.
- ` + "`berth config show`" + ` prints the options that differ from their defaults; ` + "`--all`" + ` prints all.

` + "`systemctl reload berth`" + ` and SIGHUP apply changes of the options marked "reload". Changes of other options
take effect at the next start. The daemon refuses a faulty file as a whole and keeps its
configuration.

`)
	for _, group := range groups() {
		heading := "##"
		if group != "" {
			fmt.Fprintf(&b, "## [%s]\n\n%s\n\n", group, paragraph(groupDocs[group]))
			heading = "###"
		}
		for _, o := range optionsIn(group) {
			o.describe(&b, heading, o.Key)
			fmt.Fprintf(&b, "- default: `%s`\n", o.assignment(c))
			if o.Flag != "" {
				fmt.Fprintf(&b, "- flag: `--%s`%s\n", o.Flag, o.repeatable())
			}
			if o.Reload {
				b.WriteString("- reload: yes\n")
			}
			b.WriteString("\n")
		}
	}
	for _, t := range tables() {
		fmt.Fprintf(&b, "## [%s.NAME]\n\n%s\n\n", t.Key, paragraph(t.Doc))
		if t.Reload {
			b.WriteString("- reload: yes\n\n")
		}
		for _, o := range t.Options {
			o.describe(&b, "###", t.Key+".NAME."+o.Key)
			fmt.Fprintf(&b, "- example: `%s`\n\n", o.example())
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// describe writes the reference's text about the option.
func (o option) describe(b *strings.Builder, heading, key string) {
	fmt.Fprintf(b, "%s %s\n\n%s\n\n- type: %s\n", heading, key, paragraph(o.Doc), o.typeName())
	if len(o.oneof) > 0 {
		fmt.Fprintf(b, "- values: %s\n", strings.Join(o.oneof, ", "))
	}
	if o.min != "" {
		fmt.Fprintf(b, "- minimum: %s\n", o.min)
	}
	if o.max != "" {
		fmt.Fprintf(b, "- maximum: %s\n", o.max)
	}
}

// paragraph returns text in lines of a page.
func paragraph(text string) string { return strings.Join(wrap(text, 100), "\n") }

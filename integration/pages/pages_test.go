package pages

import (
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	t.Parallel()
	page := strings.ReplaceAll(`# Title

## First part

'''sh
one \
  two
'''

1. A list:

   <!-- exit codes: 0 3 -->
   <!-- run in: guest -->
   '''sh
   three
   '''

## Second part
<!-- not run: it needs a network -->
'''sh
four
'''

'''toml
# not a heading
'''
`, "'''", fence)
	got, err := Parse("dir/install.md", page)
	if err != nil {
		t.Fatal(err)
	}
	zero := []int{0}
	want := []Block{
		{Page: "install.md", Heading: "First part", Line: 5, Language: "sh", Text: "one \\\n  two\n", Place: Machine, ExitCodes: zero},
		{Page: "install.md", Heading: "First part", Line: 14, Language: "sh", Text: "three\n", Place: Guest, ExitCodes: []int{0, 3}},
		{Page: "install.md", Heading: "Second part", Line: 20, Language: "sh", Text: "four\n", NotRun: "it needs a network", Place: Machine, ExitCodes: zero},
		{Page: "install.md", Heading: "Second part", Line: 24, Language: "toml", Text: "# not a heading\n", Place: Machine, ExitCodes: zero},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("blocks:\n%+v\nwant:\n%+v", got, want)
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ name, page, want string }{
		{"no language", "'''\nls\n'''\n", "p.md:1: the block has no language"},
		{"another name of the shell", "'''bash\nls\n'''\n", "the language of shell blocks is sh"},
		{"no end", "text\n'''sh\nls\n", "p.md:2: the block has no end"},
		{"indentation", "text\n\n    ls\n", "p.md:3: a block by indentation"},
		{"a mark above text", "<!-- not run: slow -->\ntext\n'''sh\nls\n'''\n", "p.md:2: a mark that is not directly above a block"},
		{"a mark at the end", "<!-- not run: slow -->", "a mark without a block"},
		{"a mark on another block", "<!-- not run: slow -->\n'''toml\na = 1\n'''\n", "a mark on a block that is no shell block"},
		{"no reason", "<!-- not run:  -->\n'''sh\nls\n'''\n", "not run without a value"},
		{"an unknown place", "<!-- run in: cloud -->\n'''sh\nls\n'''\n", `unknown place "cloud"`},
		{"a page that the place's test does not read", "<!-- run in: guest -->\n'''sh\nls\n'''\n", "p.md:1: TestPagesInGuest does not run blocks of this page"},
		{"a bad exit code", "<!-- exit codes: x -->\n'''sh\nls\n'''\n", `exit code "x"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			_, err := Parse("p.md", strings.ReplaceAll(test.page, "'''", fence))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

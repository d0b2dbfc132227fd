package docs

import (
	"go/ast"
	"go/doc"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Packages with examples have users, who read their documentation. go test runs each example,
// because it has an output. Each doc link leads to a declaration.
func TestExamplesAndDocLinks(t *testing.T) {
	t.Parallel()
	found := files(t, "example_test.go")
	if len(found) < 6 {
		t.Fatalf("%d packages with examples", len(found))
	}
	for path, source := range found {
		file, err := parser.ParseFile(token.NewFileSet(), path, source, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, example := range doc.Examples(file) {
			if example.Output == "" && !example.EmptyOutput {
				t.Errorf("%s: Example%s has no output, so go test does not run it", path, example.Name)
			}
		}
		p := parsePackage(t, filepath.Dir(path))
		for _, text := range docComments(p) {
			checkLinks(t, p, p.Parser().Parse(text).Content)
		}
	}
}

// parsePackage parses the package in a directory, without its tests.
func parsePackage(t *testing.T, dir string) *doc.Package {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	set, parsed := token.NewFileSet(), []*ast.File{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(set, name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		parsed = append(parsed, file)
	}
	path, err := filepath.Rel(checkout, dir)
	if err != nil {
		t.Fatal(err)
	}
	p, err := doc.NewFromFiles(set, parsed, "berth/"+filepath.ToSlash(path))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// docComments returns the doc comments of a package and its exported declarations.
func docComments(p *doc.Package) []string {
	all := []string{p.Doc}
	values := func(list []*doc.Value) {
		for _, v := range list {
			all = append(all, v.Doc)
		}
	}
	functions := func(list []*doc.Func) {
		for _, f := range list {
			all = append(all, f.Doc)
		}
	}
	values(p.Consts)
	values(p.Vars)
	functions(p.Funcs)
	for _, d := range p.Types {
		all = append(all, d.Doc)
		values(d.Consts)
		values(d.Vars)
		functions(d.Funcs)
		functions(d.Methods)
	}
	return all
}

// linkText matches a link in text that the parser has not made one, because nothing has this name.
var linkText = regexp.MustCompile(`\[\*?[A-Z]\w*(?:\.[A-Z]\w*)?\]|\[[a-z]\w*\.[A-Z]\w*(?:\.[A-Z]\w*)?\]`)

// checkLinks reports links in a doc comment of a package that lead nowhere.
func checkLinks(t *testing.T, p *doc.Package, content []comment.Block) {
	t.Helper()
	for _, block := range content {
		switch b := block.(type) {
		case *comment.List:
			for _, item := range b.Items {
				checkLinks(t, p, item.Content)
			}
		case *comment.Paragraph:
			for _, text := range b.Text {
				plain, isPlain := text.(comment.Plain)
				if dead := linkText.FindString(string(plain)); isPlain && dead != "" {
					t.Errorf("%s: the doc link %s leads nowhere", p.ImportPath, dead)
				}
				link, isLink := text.(*comment.DocLink)
				if isLink && strings.HasPrefix(link.ImportPath, "berth/") && !declares(parsePackage(t, filepath.Join(checkout, strings.TrimPrefix(link.ImportPath, "berth/"))), link) {
					t.Errorf("%s: %s has no %s", p.ImportPath, link.ImportPath, strings.TrimPrefix(link.Recv+"."+link.Name, "."))
				}
			}
		}
	}
}

// declares reports whether a package has the declaration that a link of another one names.
func declares(p *doc.Package, link *comment.DocLink) bool {
	return link.Name == "" || p.Parser().LookupSym(link.Recv, link.Name)
}

// Package points finds failpoints in source code, for tests.
package points

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Point is a call of failpoint.Reach, or of the monitor's REACH.
type Point struct {
	Name  string // empty: not a literal
	Place string // file and line
}

// Below returns all points in the Go and C files of a directory tree, except test files.
func Below(root string) ([]Point, error) {
	var all []Point
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && len(entry.Name()) > 2: // not "." and ".."
			return fs.SkipDir
		case entry.Type().IsRegular() && strings.HasSuffix(path, ".c"):
			found, err := inC(path)
			all = append(all, found...)
			return err
		case !entry.Type().IsRegular() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		found, err := in(path)
		all = append(all, found...)
		return err
	})
	return all, err
}

func in(path string) (points []Point, err error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || !isReach(call.Fun) {
			return true
		}
		p := Point{Place: files.Position(call.Pos()).String()}
		if len(call.Args) == 1 {
			if literal, ok := call.Args[0].(*ast.BasicLit); ok {
				p.Name, err = strconv.Unquote(literal.Value)
			}
		}
		points = append(points, p)
		return true
	})
	return points, err
}

var reachInC = regexp.MustCompile(`\bREACH\((?:"([^"]*)"\))?`)

func inC(path string) (points []Point, err error) {
	source, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for i, line := range strings.Split(string(source), "\n") {
		for _, match := range reachInC.FindAllStringSubmatch(line, -1) {
			points = append(points, Point{Name: match[1], Place: path + ":" + strconv.Itoa(i+1)})
		}
	}
	return points, nil
}

func isReach(f ast.Expr) bool {
	s, ok := f.(*ast.SelectorExpr)
	if !ok || s.Sel.Name != "Reach" {
		return false
	}
	pkg, ok := s.X.(*ast.Ident)
	return ok && pkg.Name == "failpoint"
}

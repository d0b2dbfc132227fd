// Package pages reads the fenced code blocks of Markdown pages. Its test runs the shell blocks of
// the operators' pages. The test of package docs parses
// all pages, so each shell block is run or says why not.
//
// HTML comments directly above a block, one a line, say how the tests treat it:
//
//	<!-- not run: REASON -->      no test runs it
//	<!-- run in: PLACE -->        another test runs it, see Places
//	<!-- exit codes: 0 3 -->      the exit codes that are right; without it only 0
package pages

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Places maps each place of "run in" to the test that runs blocks there.
var Places = map[string]Place{
	Machine:     {Test: "TestPages"},
	Guest:       {Test: "TestPagesInGuest", Pages: []string{"install.md", "operations.md"}},
	Crictl:      {Test: "TestPagesCrictl", Pages: []string{"kubelet.md"}},
	Kubelet:     {Test: "TestKubeletStandalone", Pages: []string{"standalone.md"}},
	Kubeadm:     {Test: "TestControlPlaneKubeadm", Pages: []string{"kubeadm.md"}},
	KubeadmNode: {Test: "TestControlPlaneKubeadm", Pages: []string{"kubeadm.md"}},
	Migration:   {Test: "TestControlPlaneMigration", Pages: []string{"migration.md"}},
}

// Place is where blocks run.
type Place struct {
	Test  string   // name of the test
	Pages []string // the pages whose blocks the test runs; nil: all
}

const (
	// Machine is the place of blocks without "run in": a private machine, see contrib/machine.
	Machine = "machine"
	// Guest is a guest with systemd, see contrib/guest -packages.
	Guest = "guest"
	// Crictl is a machine with crictl, and a pod of contrib/examples/web.yaml.
	Crictl = "crictl"
	// Kubelet is a machine with a kubelet that has no control plane.
	Kubelet = "kubelet"
	// Kubeadm is a machine with kubeadm and its cluster.
	Kubeadm = "kubeadm"
	// KubeadmNode is a second machine, which joins that cluster.
	KubeadmNode = "kubeadm-node"
	// Migration is a machine with a control plane, and a node that runs containerd.
	Migration = "migration"
)

// Block is a fenced code block of a page.
type Block struct {
	Page     string // name of the file
	Heading  string // the heading above the block
	Line     int    // line of the opening fence, from 1
	Language string // the word after the fence
	Text     string

	NotRun    string // why no test runs the block; empty if one does
	Place     string // a key of Places
	ExitCodes []int
}

// Name returns the block's page, line and heading.
func (b Block) Name() string { return fmt.Sprintf("%s:%d %s", b.Page, b.Line, b.Heading) }

// IsShell reports whether the block contains commands.
func (b Block) IsShell() bool { return b.Language == "sh" }

// RunsIn reports whether the block contains commands that a test runs in a place.
func (b Block) RunsIn(place string) bool { return b.IsShell() && b.NotRun == "" && b.Place == place }

// Run executes the block in a directory and returns its output. A block ends at its first command
// that fails.
func (b Block) Run(ctx context.Context, dir string, env ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", b.Text)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		return "", fmt.Errorf("run %s: %w", b.Name(), err)
	}
	if code := cmd.ProcessState.ExitCode(); !slices.Contains(b.ExitCodes, code) {
		return string(out), fmt.Errorf("%s: exit code %d, want one of %v:\n%s\noutput:\n%s", b.Name(), code, b.ExitCodes, b.Text, out)
	}
	return string(out), nil
}

// Read parses the pages of a checkout: README.md and docs/*.md. It returns their blocks by the name
// of the file.
func Read(root string) (map[string][]Block, error) {
	paths, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		return nil, fmt.Errorf("list pages: %w", err)
	}
	all := map[string][]Block{}
	for _, path := range append(paths, filepath.Join(root, "README.md")) {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read page: %w", err)
		}
		blocks, err := Parse(path, string(content))
		if err != nil {
			return nil, err
		}
		all[filepath.Base(path)] = blocks
	}
	return all, nil
}

const fence = "```"

var mark = regexp.MustCompile(`^<!-- (not run|run in|exit codes): (.*) -->$`)

// Parse returns the blocks of a page. It refuses blocks without a language or without an end,
// blocks by indentation, which have no language, and marks that apply to no shell block.
func Parse(path, content string) ([]Block, error) {
	p := parser{page: filepath.Base(path)}
	for i, line := range strings.Split(content, "\n") {
		p.line(i+1, line)
	}
	if p.open {
		p.fail(p.block.Line, "the block has no end")
	}
	if p.marked {
		p.fail(p.block.Line, "a mark without a block")
	}
	return p.blocks, errors.Join(p.errs...)
}

// parser is the state of Parse.
type parser struct {
	page, heading string
	blocks        []Block
	errs          []error

	block  Block // the open block, or the marks of the next one
	open   bool
	marked bool // a mark precedes the next line
	blank  bool // the previous line is blank
	indent int  // of the open block's fence
}

func (p *parser) fail(line int, format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("%s:%d: %s", p.page, line, fmt.Sprintf(format, args...)))
}

func (p *parser) line(n int, line string) {
	switch word, opens := strings.CutPrefix(strings.TrimSpace(line), fence); {
	case opens && p.open:
		p.close()
	case opens:
		p.indent = strings.Index(line, fence)
		p.begin(n, word)
	case p.open:
		p.block.Text += strings.TrimPrefix(line, strings.Repeat(" ", p.indent)) + "\n"
	default:
		p.prose(n, line)
	}
}

func (p *parser) begin(n int, language string) {
	p.block.Page, p.block.Heading, p.block.Line, p.block.Language = p.page, p.heading, n, language
	p.open = true
	if language == "" {
		p.fail(n, "the block has no language; the language of other texts is text")
	}
	if slices.Contains([]string{"bash", "shell", "console"}, language) {
		p.fail(n, "the language of shell blocks is sh")
	}
	if p.marked && !p.block.IsShell() {
		p.fail(n, "a mark on a block that is no shell block")
	}
	p.marked = false
	if p.block.Place == "" {
		p.block.Place = Machine
	}
	if p.block.ExitCodes == nil {
		p.block.ExitCodes = []int{0}
	}
}

func (p *parser) close() {
	p.blocks = append(p.blocks, p.block)
	p.block, p.open = Block{}, false
}

// prose reads a line outside blocks.
func (p *parser) prose(n int, line string) {
	if m := mark.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
		p.mark(n, m[1], strings.TrimSpace(m[2]))
		return
	}
	if p.marked {
		p.fail(n, "a mark that is not directly above a block")
		p.block, p.marked = Block{}, false
	}
	if heading := strings.TrimLeft(line, "#"); heading != line {
		p.heading = strings.TrimSpace(heading)
	}
	if p.blank && strings.HasPrefix(line, "    ") {
		p.fail(n, "a block by indentation; use a fence with a language")
	}
	p.blank = line == ""
}

func (p *parser) mark(n int, name, value string) {
	p.block.Line, p.marked = n, true
	if value == "" {
		p.fail(n, "%s without a value", name)
	}
	switch name {
	case "not run":
		p.block.NotRun = value
	case "run in":
		p.block.Place = value
		if place, known := Places[value]; !known {
			p.fail(n, "unknown place %q", value)
		} else if place.Pages != nil && !slices.Contains(place.Pages, p.page) {
			p.fail(n, "%s does not run blocks of this page", place.Test)
		}
	case "exit codes":
		for _, word := range strings.Fields(value) {
			code, err := strconv.Atoi(word)
			if err != nil {
				p.fail(n, "exit code %q: %v", word, err)
			}
			p.block.ExitCodes = append(p.block.ExitCodes, code)
		}
	}
}

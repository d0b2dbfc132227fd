package main

import (
	"archive/tar"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"golang.org/x/sys/unix"

	"berth/integration/bench/report"
	"berth/integration/bench/subject"
	"berth/integration/fixture"
)

// checkpointExperiments compare checkpoints by berth with those by runc and CRIU (option
// -checkpoint). One sample measures both.
var checkpointExperiments = []experiment{
	saveAndRestore("shell", []string{"/bin/sh", "/bin/ticker.sh"}),
	saveAndRestore("200m", []string{"/bin/ticker", "200"}),
	archive("200m", []string{"/bin/ticker", "200"}),
	skew("skew", []string{"/bin/sh", "/bin/ticker.sh"}),
}

//go:embed testdata/ticker.c
var tickerC []byte

//go:embed testdata/ticker.sh
var tickerShell string

// openCheckpoints starts berth with CRIU, and prepares runc.
func (b *bench) openCheckpoints(ctx context.Context) (err error) {
	if b.registry, err = fixture.NewRegistry(); err != nil {
		return err
	}
	img, err := tickerImage(ctx, b.state)
	if err != nil {
		return err
	}
	name, err := b.registry.Push("bench/ticker:latest", img)
	if err != nil {
		return err
	}
	files := filepath.Join(b.dir, "image")
	if err := extract(img, files); err != nil {
		return err
	}
	site := &subject.Site{Machine: b.machine, Dir: b.dir, State: b.state, Work: subject.Workload{Image: name}}
	site.CRIU = filepath.Join(b.checkpoint, "criu")
	s, err := site.Berth(ctx, report.Ours, b.berth, b.revision, true)
	if err != nil {
		return err
	}
	b.subjects = []*subject.Subject{s}
	if err := s.PullWorkload(ctx); err != nil {
		return err
	}
	b.newPair = func(command []string) (*pair, error) {
		p := &pair{dir: b.dir, state: b.state, berth: s.NewCRI(command)}
		p.hand, err = site.Runc(ctx, filepath.Join(b.checkpoint, "runc"), site.CRIU, files, p.berth)
		if err == nil {
			b.byHand = p.hand.Version
		}
		return p, err
	}
	_, err = b.newPair(nil)
	return err
}

// tickerImage returns an image with busybox and both tickers.
func tickerImage(ctx context.Context, dir string) (v1.Image, error) {
	program, err := compile(ctx, dir, "ticker", tickerC)
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	layer, err := fixture.Tree{
		fixture.Dir("bin", 0o755), fixture.File("bin/ticker", 0o755, string(content)), fixture.File("bin/ticker.sh", 0o644, tickerShell),
	}.Layer(fixture.Gzip)
	if err != nil {
		return nil, err
	}
	return fixture.Image(v1.Config{}, layer)
}

// compile compiles a C program into a directory, and returns its path.
func compile(ctx context.Context, dir, name string, text []byte) (program string, err error) {
	program = filepath.Join(dir, name)
	if err := os.WriteFile(program+".c", text, 0o600); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, "cc", "-O2", "-static", "-o", program, program+".c").CombinedOutput(); err != nil {
		return "", fmt.Errorf("compile %s.c: %w: %s", name, err, out)
	}
	return program, nil
}

// extract writes the files of an image into a new directory.
func extract(img v1.Image, dir string) (err error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	content := mutate.Extract(img)
	defer func() { err = errors.Join(err, content.Close()) }()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for archive := tar.NewReader(content); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = extractEntry(root, h, archive)
		}
		if err != nil {
			return fmt.Errorf("extract the image: %w", err)
		}
	}
}

func extractEntry(root *os.Root, h *tar.Header, content io.Reader) error {
	name := strings.TrimSuffix(h.Name, "/")
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, 0o755)
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return root.Link(h.Linkname, name)
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, os.FileMode(h.Mode))
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	return errors.Join(err, f.Close())
}

// pair is one sample's containers of both sides.
type pair struct {
	dir, state string // on a disk, on tmpfs
	berth      *subject.CRI
	hand       *subject.Hand
}

// checkpointSample returns a sample that runs f with containers of both sides. f gets the sides in
// turn as first.
func checkpointSample(containers int, command []string,
	f func(context.Context, *pair, *ticked) (values, error)) func(context.Context, *contestant) (values, error) {
	return func(ctx context.Context, c *contestant) (v values, err error) {
		p, err := c.b.newPair(command)
		if err != nil {
			return nil, err
		}
		top, err := os.MkdirTemp(p.state, "sample-")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, p.hand.Remove(ctx), p.berth.Remove(ctx), os.RemoveAll(top)) }()
		ours := &ticked{Checkpointer: p.berth, top: filepath.Join(top, "berth")}
		theirs := &ticked{Checkpointer: p.hand, top: filepath.Join(top, "hand")}
		for _, side := range []*ticked{ours, theirs} { // runc's containers need the pod of berth's
			if err := side.run(ctx, containers); err != nil {
				return nil, err
			}
		}
		order := []*ticked{ours, theirs}
		if c.n%2 == 1 {
			order = []*ticked{theirs, ours}
		}
		for _, side := range order {
			got, err := f(ctx, p, side)
			if err != nil {
				return nil, err
			}
			if side == ours {
				v = got
				continue
			}
			c.keep(got, report.ByHand)
		}
		return v, nil
	}
}

// keep adds values to another column than the contestant's.
func (c *contestant) keep(v values, column string) {
	if c.warm {
		return
	}
	for row, list := range v {
		series := c.b.results.Of(row, column)
		series.Values = append(series.Values, list...)
	}
}

// saveAndRestore saves a container into memory and restores it.
func saveAndRestore(name string, command []string) experiment {
	return experiment{
		name: name + ", saved and restored", rows: []string{name + "-frozen", name + "-checkpoint", name + "-checkpoint-cpu", name + "-start"},
		applies: builtInNetwork, warmUp: 2, samples: wanted, limit: time.Minute, budget: 2 * time.Minute,
		sample: checkpointSample(1, command, func(ctx context.Context, _ *pair, side *ticked) (values, error) {
			dir := side.top + "-saved"
			if err := os.Mkdir(dir, 0o700); err != nil {
				return nil, err
			}
			saved, err := side.measure(ctx, func() error { return side.Save(ctx, dir) })
			if err != nil {
				return nil, err
			}
			start, err := side.restore(ctx, dir)
			if err != nil {
				return nil, err
			}
			return values{
				name + "-frozen": {ms(saved.frozen)}, name + "-checkpoint": {ms(saved.took)}, name + "-checkpoint-cpu": {ms(saved.cpu)},
				name + "-start": {ms(start)},
			}, os.RemoveAll(dir)
		}),
	}
}

// archive saves a container into a tar on the disk.
func archive(name string, command []string) experiment {
	return experiment{
		name: name + ", saved on the disk", rows: []string{name + "-archive", name + "-archive-cpu", name + "-archive-frozen"},
		applies: builtInNetwork, warmUp: 1, samples: wanted, limit: time.Minute, budget: 2 * time.Minute,
		sample: checkpointSample(1, command, func(ctx context.Context, p *pair, side *ticked) (values, error) {
			unix.Sync()
			file := filepath.Join(p.dir, filepath.Base(side.top)+".tar")
			saved, err := side.measure(ctx, func() error { return side.Archive(ctx, file) })
			if err != nil {
				return nil, err
			}
			return values{
				name + "-archive": {ms(saved.took)}, name + "-archive-cpu": {ms(saved.cpu)}, name + "-archive-frozen": {ms(saved.frozen)},
			}, os.Remove(file)
		}),
	}
}

// skewContainers is the number of containers that are frozen together.
const skewContainers = 10

// skew freezes the containers of a pod.
func skew(row string, command []string) experiment {
	return experiment{
		name: "ten containers frozen", rows: []string{row}, applies: builtInNetwork, warmUp: 1, samples: wanted, limit: time.Minute, budget: time.Minute,
		sample: checkpointSample(skewContainers, command, func(ctx context.Context, p *pair, side *ticked) (values, error) {
			dir := side.top + "-saved"
			if err := os.Mkdir(dir, 0o700); err != nil {
				return nil, err
			}
			freeze := func() error { return side.Save(ctx, dir) }
			if side.Checkpointer == p.hand {
				freeze = func() error { return p.hand.Freeze(ctx) }
			}
			saved, err := side.measure(ctx, freeze)
			if err != nil {
				return nil, err
			}
			return values{row: {ms(saved.skew)}}, os.RemoveAll(dir)
		}),
	}
}

// ticked is one side of a sample, with the directories of its containers.
type ticked struct {
	subject.Checkpointer
	top   string
	ticks []string
}

// run starts containers and waits until they look at the clock.
func (t *ticked) run(ctx context.Context, containers int) error {
	for i := range containers {
		dir, err := newTicks(t.top + "-ticks" + strconv.Itoa(i))
		if err != nil {
			return err
		}
		t.ticks = append(t.ticks, dir)
	}
	if err := t.Run(ctx, t.ticks...); err != nil {
		return err
	}
	for _, dir := range t.ticks {
		if _, err := awaitGap(ctx, dir, time.Time{}, 0); err != nil {
			return err
		}
	}
	return wait(ctx, settled)
}

// settled is how long containers run before and after they are saved.
const settled = 100 * time.Millisecond

// newTicks makes a directory for a container.
func newTicks(dir string) (string, error) {
	return dir, errors.Join(os.Mkdir(dir, 0o755), unix.Mkfifo(filepath.Join(dir, "wake"), 0o600))
}

// cost is what saving containers has cost.
type cost struct {
	took, cpu, frozen time.Duration
	skew              time.Duration // between the first and the last begin of the gaps
}

// shortestFreeze is shorter than any freeze, and longer than usual waits for a processor.
const shortestFreeze = 8 * time.Millisecond

// measure calls save and finds out from the containers how long they did not run.
func (t *ticked) measure(ctx context.Context, save func() error) (c cost, err error) {
	before, err := t.CPU()
	if err != nil {
		return c, err
	}
	began := time.Now()
	if err := save(); err != nil {
		return c, err
	}
	c.took = time.Since(began)
	if err := wait(ctx, settled); err != nil {
		return c, err
	}
	after, err := t.CPU()
	if err != nil {
		return c, err
	}
	c.cpu = after - before
	var first, last time.Time
	for _, dir := range t.ticks {
		g, err := awaitGap(ctx, dir, began, shortestFreeze)
		if err != nil {
			return c, err
		}
		c.frozen = max(c.frozen, g.length)
		begin := g.end.Add(-g.length)
		if first.IsZero() || begin.Before(first) {
			first = begin
		}
		if begin.After(last) {
			last = begin
		}
	}
	c.skew = last.Sub(first)
	return c, nil
}

// restore restores the first container and returns the time until it looks at the clock.
func (t *ticked) restore(ctx context.Context, dir string) (time.Duration, error) {
	ticks, err := newTicks(t.top + "-restored")
	if err != nil {
		return 0, err
	}
	began, err := t.Restore(ctx, dir, ticks)
	if err != nil {
		return 0, err
	}
	g, err := awaitGap(ctx, ticks, began, shortestFreeze)
	return g.end.Sub(began), err
}

// gap is a time in which a container did not run.
type gap struct {
	end    time.Time
	length time.Duration
}

// awaitGap returns the longest gap that ended after a time. It waits for one of this length.
func awaitGap(ctx context.Context, ticks string, after time.Time, length time.Duration) (gap, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		content, err := os.ReadFile(filepath.Join(ticks, "gaps"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return gap{}, err
		}
		longest, found := longestGap(string(content), after)
		if found && longest.length >= length {
			return longest, nil
		}
		if err := wait(ctx, time.Millisecond); err != nil {
			return gap{}, fmt.Errorf("wait until the container looks at the clock: %w", err)
		}
	}
}

// longestGap finds the longest gap that ended after a time in the lines of a ticker.
func longestGap(lines string, after time.Time) (longest gap, found bool) {
	for line := range strings.Lines(lines) {
		var end, length int64
		if n, _ := fmt.Sscanf(line, "%d %d\n", &end, &length); n != 2 || !strings.HasSuffix(line, "\n") {
			continue // not written whole yet
		}
		g := gap{time.UnixMicro(end), time.Duration(length) * time.Microsecond}
		if g.end.After(after) && (!found || g.length > longest.length) {
			longest, found = g, true
		}
	}
	return longest, found
}

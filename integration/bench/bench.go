package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/bench/report"
	"berth/integration/bench/subject"
	"berth/integration/fixture"
	"berth/shim/payload"
)

// bench is one run of the benchmark.
type bench struct {
	options
	begin    processors
	waited   time.Duration // waited for a quiet machine
	registry *fixture.Registry
	subjects []*subject.Subject
	results  report.Results
	pushed   map[string]string // names of the images for pulls, by the form of their layers

	timelines []report.Timeline

	experiments []experiment
	lines       []report.Row // all rows of the experiments

	newPair func(command []string) (*pair, error) // of openCheckpoints
	byHand  string                                // versions of runc and CRIU

	cold *cold // of openCold
}

//go:embed testdata/withoutcpu.c
var withoutCPU []byte

// open starts the registry and all runtimes. A runtime that does not start is left out, but berth's
// failure is an error.
func (b *bench) open(ctx context.Context) error {
	var err error
	if b.registry, err = fixture.NewRegistry(); err != nil {
		return err
	}
	work := subject.Workload{Image: b.image}
	if b.image == "" {
		if work, err = b.pushWorkload(); err != nil {
			return err
		}
	}
	site := &subject.Site{Machine: b.machine, Dir: b.dir, State: b.state, Work: work}
	if controllers, ok := subject.Controllers(); ok && b.peers != "" && !slices.Contains(controllers, "cpu") {
		if site.WithoutCPU, err = compile(ctx, b.dir, "withoutcpu", withoutCPU); err != nil {
			return err
		}
	}
	if err := b.openBerth(ctx, site, report.Ours, b.berth, b.revision); err != nil {
		return err
	}
	if b.against != "" {
		if err := b.openBerth(ctx, site, "berth-other", b.against, ""); err != nil {
			return err
		}
	}
	if b.shim && b.peers != "" {
		b.add(site.Berth(ctx, "berth-shim", b.berth, b.revision, false, `default_handler = "shim"`, "[handlers.shim]", `type = "shim"`,
			fmt.Sprintf("path = %q", filepath.Join(b.peers, "containerd-shim-runc-v2")),
			fmt.Sprintf("options = [%q]", "BinaryName="+filepath.Join(b.peers, "runc"))))
	}
	if b.peers != "" {
		if err := b.openPeers(ctx, site); err != nil {
			return err
		}
	}
	for _, arg := range b.external {
		b.add(subject.External(ctx, arg, b.machine, b.dir+"/logs", work))
	}
	b.subjects = slices.DeleteFunc(b.subjects, func(s *subject.Subject) bool {
		err := s.PullWorkload(ctx)
		if err != nil {
			b.logError(s, err)
		}
		return err != nil
	})
	return nil
}

// openBerth starts one build of berth, once with CNI plugins and once with the built-in network.
func (b *bench) openBerth(ctx context.Context, site *subject.Site, column, bin, revision string) error {
	s, err := site.Berth(ctx, column, bin, revision, false)
	if err != nil {
		return err
	}
	b.subjects = append(b.subjects, s)
	own, err := subject.HasBuiltInNetwork(ctx, bin)
	if err != nil {
		return err
	}
	if own {
		b.add(site.Berth(ctx, column, bin, revision, true))
	}
	return nil
}

// openPeers starts CRI-O with crun, and containerd with runc and with crun, if their programs
// exist.
func (b *bench) openPeers(ctx context.Context, site *subject.Site) error {
	program, err := pauseProgram()
	if err != nil {
		return err
	}
	layer, err := fixture.Tree{fixture.File("pause", 0o755, program)}.Layer(fixture.Gzip)
	if err != nil {
		return err
	}
	img, err := fixture.ImageOf(v1.Config{Entrypoint: []string{"/pause"}}, layer)
	if err != nil {
		return err
	}
	sandbox, err := b.registry.Push("bench/pause:latest", img)
	if err != nil {
		return err
	}
	b.add(site.Containerd(ctx, b.peers, filepath.Join(b.peers, "runc"), b.registry.Host, sandbox))
	crun, err := b.peer("crun")
	if err != nil {
		return err
	}
	s, err := site.Containerd(ctx, b.peers, crun, b.registry.Host, sandbox)
	if err == nil {
		s.Twin = true
	}
	b.add(s, err)
	conmon, err := b.peer("conmon")
	if err != nil {
		return err
	}
	b.add(site.CRIO(ctx, b.peers, crun, conmon, b.registry.Host, sandbox))
	return nil
}

// peer returns the path of a program: that of the peers, or else the machine's.
func (b *bench) peer(name string) (string, error) {
	path := filepath.Join(b.peers, name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return exec.LookPath(name)
}

// add adds a runtime, or prints why it is left out.
func (b *bench) add(s *subject.Subject, err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: left out:", err)
		return
	}
	b.subjects = append(b.subjects, s)
}

// pushWorkload pushes the pods' image: busybox and a program that waits for SIGTERM.
func (b *bench) pushWorkload() (subject.Workload, error) {
	work := subject.Workload{Command: []string{subject.TermWaiter}}
	program, err := pauseProgram()
	if err != nil {
		return work, err
	}
	layer, err := fixture.Tree{fixture.Dir("bin", 0o755), fixture.File("bin/"+subject.TermWaiter, 0o755, program)}.Layer(fixture.Gzip)
	if err != nil {
		return work, err
	}
	img, err := fixture.Image(v1.Config{Cmd: work.Command}, layer)
	if err != nil {
		return work, err
	}
	work.Image, err = b.registry.Push("bench/pod:latest", img)
	return work, err
}

// pauseProgram returns the path of berth's pause, which all runtimes use.
func pauseProgram() (program string, err error) {
	dir, err := os.MkdirTemp("", "payload")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	paths, err := payload.Install(dir)
	if err != nil {
		return "", err
	}
	content, err := os.ReadFile(paths.Pause + payload.PauseProgram)
	return string(content), err
}

func (b *bench) close() error {
	var errs []error
	for _, s := range b.subjects {
		errs = append(errs, s.Close())
	}
	if b.registry != nil {
		errs = append(errs, b.registry.Close())
	}
	return errors.Join(errs...)
}

func (b *bench) selected(row report.Row) bool { return b.rows.MatchString(row.Key) }

// columns returns the runtimes, each once, berth last.
func (b *bench) columns() (all []report.Column) {
	for _, s := range slices.Backward(b.subjects) {
		if !s.BuiltInNetwork || b.checkpoint != "" {
			all = append(all, report.Column{Name: s.Column, Version: s.Version})
		}
	}
	return all
}

func (b *bench) logError(s *subject.Subject, err error) {
	fmt.Fprintf(os.Stderr, "bench: %s: %v\n", s.Column, err)
}

// measure runs all experiments that a selected row needs.
func (b *bench) measure(ctx context.Context) {
	for _, e := range b.experiments {
		if ctx.Err() != nil {
			return
		}
		if !slices.ContainsFunc(b.lines, func(r report.Row) bool { return b.selected(r) && slices.Contains(e.rows, r.Key) }) {
			continue
		}
		if slices.Contains(e.rows, "kubelet-110") && b.kubelet == "" {
			continue
		}
		subjects := slices.Clone(b.subjects)
		subjects = slices.DeleteFunc(subjects, func(s *subject.Subject) bool { return !e.applies(s) })
		begin := time.Now()
		if e.oneByOne {
			for i := range subjects {
				b.experiment(ctx, e, subjects[i:i+1])
			}
		} else {
			b.experiment(ctx, e, subjects)
		}
		fmt.Fprintf(os.Stderr, "bench: %s: %v\n", e.name, time.Since(begin).Round(time.Second))
		if err := b.write(); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
	}
}

// experiment runs one experiment on several runtimes in turn.
func (b *bench) experiment(ctx context.Context, e experiment, subjects []*subject.Subject) {
	b.awaitQuiet(ctx)
	var all []*contestant
	for _, s := range subjects {
		c := &contestant{b: b, e: e, s: s}
		if c.prepare(ctx) {
			all = append(all, c)
		}
	}
	samples := e.samples(b.samples)
	for n := range e.warmUp + samples {
		// An experiment with a preparation may keep the runtimes busy, so the machine does not
		// become quiet.
		if n > 0 && e.prepare == nil && slices.ContainsFunc(all, (*contestant).needsSample) {
			b.awaitQuiet(ctx)
		}
		for i := range all {
			if n%2 == 1 {
				i = len(all) - 1 - i
			}
			all[i].sample(ctx, n < e.warmUp)
		}
	}
	for _, c := range all {
		c.clean(ctx)
	}
}

// contestant is a runtime in an experiment.
type contestant struct {
	b     *bench
	e     experiment
	s     *subject.Subject
	state any // result of the preparation

	warm   bool          // the sample is a warm-up
	n      int           // counted samples
	spent  time.Duration // duration of the counted samples
	failed bool
}

// enough is the minimum number of a runtime's samples, however long they take.
const enough = 5

// prepare runs the experiment's preparation. It returns false if the runtime fails.
func (c *contestant) prepare(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, c.e.limit)
	defer cancel()
	if c.e.prepare != nil {
		var err error
		if c.state, err = c.e.prepare(ctx, c.b, c.s); err != nil {
			c.fail(ctx, err)
		}
	}
	return !c.failed
}

// needsSample reports whether to take more samples: the runtime has not failed and has time left.
func (c *contestant) needsSample() bool { return !c.failed && (c.n < enough || c.spent <= c.e.budget) }

// sample takes a sample, unless the runtime has failed or used up its time.
func (c *contestant) sample(ctx context.Context, warmUp bool) {
	if ctx.Err() != nil || !c.needsSample() {
		return
	}
	limited, cancel := context.WithTimeout(ctx, c.e.limit)
	defer cancel()
	begin := time.Now()
	err := c.s.Rest(limited)
	var pace float64
	if err == nil {
		pace, err = measurePace(limited)
	}
	var values values
	c.warm = warmUp
	if err == nil {
		values, err = c.e.sample(limited, c)
	}
	if err != nil {
		c.fail(ctx, err)
		return
	}
	if warmUp {
		return
	}
	c.n++
	c.spent += time.Since(begin)
	for row, v := range values {
		series := c.b.results.Of(row, c.s.Column)
		series.Values = append(series.Values, v...)
		if c.s.Column == report.Ours { // other runtimes have background work, which changes the pace
			p := c.b.results.Pace(row)
			p.Values = append(p.Values, pace)
		}
	}
}

// fail records an error for all rows of the experiment and removes its pods.
func (c *contestant) fail(ctx context.Context, err error) {
	c.failed = true
	if ctx.Err() != nil { // interrupted, not failed
		c.clean(ctx)
		return
	}
	c.b.logError(c.s, fmt.Errorf("%s: %w", c.e.name, err))
	for _, row := range c.e.rows {
		c.b.results.Of(row, c.s.Column).Failed = err.Error()
	}
	c.clean(ctx)
}

// cleanLimit bounds the removal of an experiment's pods.
const cleanLimit = 5 * time.Minute

// clean removes all pods, also after an interruption.
func (c *contestant) clean(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanLimit)
	defer cancel()
	if err := c.s.Clean(ctx); err != nil {
		c.b.logError(c.s, fmt.Errorf("%s: clean up: %w", c.e.name, err))
	}
}

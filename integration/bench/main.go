// Command bench measures CRI runtimes side by side with the same client: berth, the peers whose
// programs it finds, and runtimes that already run. contrib/bench builds the programs and calls it;
// its header explains the options.
//
// The samples of the runtimes alternate, forwards and backwards, so that all runtimes see the same
// load from other work. An experiment with a large preparation runs on one runtime at a time.
// Before each sample the runtime comes to rest (subject.Rest). experiments.go defines the
// experiments. A runtime that fails in an experiment takes no further part in it, and the table
// says so.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	goruntime "runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/integration/bench/report"
	"berth/integration/bench/subject"
)

type options struct {
	berth    string // directory of programs
	shim     bool   // berth with containerd's shim
	against  string // directory of another build of berth; empty: no comparison
	peers    string
	revision string // revision of berth
	image    string
	samples  int
	quiet    float64 // a round starts only at this pace in ms or below; 0: at any pace
	rows     *regexp.Regexp
	dir      string // directory on a disk
	state    string // directory on tmpfs
	machine  string // cgroup of all runtimes and pods
	kubelet  string // path of the program; empty: no row needs it
	docs     string // directory of performance.md
	// checkpoint is the directory of the programs runc and criu. With it only checkpoints are
	// measured.
	checkpoint string
	// coldDir is the directory of the large image. With it only cold starts are measured.
	coldDir string
	cgroup1 bool // the machine has cgroup v1, and only rows that depend on it are measured

	external []string
}

func main() {
	o := options{rows: regexp.MustCompile("")}
	flag.StringVar(&o.berth, "berth", "bin", "directory of berth's programs")
	flag.BoolVar(&o.shim, "shim", false, "also measure berth with containerd's shim, beside containerd with the same shim")
	flag.StringVar(&o.against, "against", "", "directory of another build of berth to compare with; empty: no comparison")
	flag.StringVar(&o.peers, "peers", "", "directory of the other runtimes' programs; empty: measure none of them")
	flag.StringVar(&o.revision, "revision", "", "berth's commit, shown beside its version")
	flag.StringVar(&o.image, "image", "", "image of the pods, with sh, sleep and true; empty: an image from a registry on loopback")
	flag.IntVar(&o.samples, "samples", 30, "samples of each row and runtime, if time allows")
	flag.Float64Var(&o.quiet, "quiet", 0, "wait with each round of samples until ten starts of a small program take at most this many ms; 0: do not wait")
	flag.Func("rows", "rows to measure: a regular expression that matches part of their keys", func(text string) (err error) {
		o.rows, err = regexp.Compile(text)
		return err
	})
	flag.StringVar(&o.dir, "dir", "", "directory on a disk for files that outlive a reboot")
	flag.StringVar(&o.state, "state", "", "directory on tmpfs for files that do not outlive a reboot")
	flag.StringVar(&o.machine, "machine", os.Getenv("BERTH_MACHINE"), "cgroup of all runtimes and pods")
	flag.StringVar(&o.kubelet, "kubelet", "", "kubelet's program, for the row kubelet-110")
	flag.StringVar(&o.docs, "docs", "", "directory for performance.md and its drawings; empty: do not write them")
	flag.StringVar(&o.checkpoint, "checkpoint", "", "directory with the programs runc and criu: measure only checkpoints by berth and by them")
	flag.StringVar(&o.coldDir, "cold", "", "directory of cold.tar.gz, the layer of a large image: measure only starts of containers whose image is not there")
	flag.BoolVar(&o.cgroup1, "cgroup1", false, "measure only the rows that depend on the version of cgroups, on a machine with cgroup v1")
	flag.Parse()
	o.external = flag.Args()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	if o.dir == "" || o.state == "" || o.machine == "" || o.samples < 1 {
		return fmt.Errorf("-dir, -state, -machine and -samples must be given")
	}
	b := &bench{options: o, pushed: map[string]string{}, experiments: experiments, lines: report.Rows}
	open := b.open
	if o.checkpoint != "" {
		b.experiments, b.lines, open = checkpointExperiments, report.CheckpointRows, b.openCheckpoints
	}
	if o.coldDir != "" {
		b.experiments, b.lines, open = coldExperiments(), coldRows(), b.openCold
	}
	if o.cgroup1 {
		b.lines = report.Cgroup1Rows
	}
	if !slices.ContainsFunc(b.lines, b.selected) {
		return fmt.Errorf("-rows %q matches none of %v", o.rows, b.keys())
	}
	if b.begin, err = readProcessors(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := open(ctx); err != nil {
		return err
	}
	b.measure(ctx)
	if o.checkpoint != "" {
		return errors.Join(report.Checkpoints{Setting: b.setting(), Results: &b.results}.Print(os.Stdout), ctx.Err())
	}
	if o.coldDir != "" {
		return errors.Join(b.coldStarts().Print(os.Stdout), ctx.Err())
	}
	fmt.Println(b.setting())
	rows := slices.DeleteFunc(slices.Clone(b.lines), func(r report.Row) bool { return !b.selected(r) })
	if err := report.Table(os.Stdout, rows, &b.results, b.columns()); err != nil {
		return err
	}
	return ctx.Err()
}

func (b *bench) keys() (all []string) {
	for _, row := range b.lines {
		all = append(all, row.Key)
	}
	return all
}

// write writes the page and its drawings, also before all rows are measured.
func (b *bench) write() error {
	if b.docs == "" {
		return nil
	}
	if b.checkpoint != "" {
		return report.Checkpoints{Setting: b.setting(), Results: &b.results}.Write(b.docs)
	}
	if b.coldDir != "" {
		return b.coldStarts().Write(b.docs)
	}
	if b.cgroup1 {
		return report.Cgroup1{Setting: b.setting(), Results: &b.results, Columns: b.columns()}.Write(b.docs)
	}
	return report.Page{Setting: b.setting(), Results: &b.results, Columns: b.columns(), Timelines: b.timelines}.Write(b.docs)
}

func (b *bench) coldStarts() report.ColdStarts {
	return report.ColdStarts{Setting: b.setting(), Image: b.cold.about, Rows: b.lines, Results: &b.results}
}

// setting describes the machine, the versions and the date.
func (b *bench) setting() string {
	var versions []string
	for _, c := range b.columns() {
		versions = append(versions, c.Version)
	}
	if b.byHand != "" {
		versions = append(versions, b.byHand)
	}
	waited := ""
	if b.quiet > 0 {
		waited = fmt.Sprintf("\nEach sample waited until ten starts of a small program took at most %g ms. All these waits took %.0f minutes (at most %.0f).",
			b.quiet, b.waited.Minutes(), quietPatience.Minutes())
	}
	stolen := "an unknown part"
	if now, err := readProcessors(); err == nil {
		stolen = fmt.Sprintf("%.0f %%", 100*now.stolenSince(b.begin))
	}
	return fmt.Sprintf("%s, %d CPUs, %.0f GiB, Linux %s, %s, images on %s. Measured on %s, %d samples per row unless n says otherwise.\n"+
		"Versions: %s.\nOther machines on the host took %s of the requested processor time (steal).%s\n",
		processor(), goruntime.NumCPU(), memorySize(), kernel(), cgroups(), filesystem(b.dir), time.Now().UTC().Format("2 January 2006"), b.samples,
		strings.Join(versions, "; "), stolen, waited)
}

// processor returns the processor's model name.
func processor() string {
	content, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown processor"
	}
	for line := range strings.Lines(string(content)) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return goruntime.GOARCH
}

// memorySize returns the machine's memory in GiB.
func memorySize() float64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return float64(info.Totalram) * float64(info.Unit) / (1 << 30)
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown version"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// filesystem returns the name of the filesystem that holds dir.
func filesystem(dir string) string {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return "an unknown filesystem"
	}
	switch fs.Type {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "XFS"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	}
	return fmt.Sprintf("a filesystem of type %#x", fs.Type)
}

// cgroups names the version of cgroups, and what a machine that has v1, too, does not give to v2.
func cgroups() string {
	controllers, ok := subject.Controllers()
	if !ok {
		return "cgroup v1"
	}
	missing := slices.DeleteFunc([]string{"cpu", "cpuset", "io", "memory", "pids"}, func(name string) bool { return slices.Contains(controllers, name) })
	if len(missing) == 0 {
		return "cgroup v2"
	}
	return "cgroup v2 without the controllers " + strings.Join(missing, ", ") + ", so no runtime sets their limits"
}

// Command bench measures CRI runtimes side by side with the same client: berth, those that it finds programs for, and
// those that run already. contrib/bench builds what it needs and calls it; its header explains the options.
//
// The samples of several runtimes alternate, forwards and backwards, so that all of them see the same neighbours.
// Between two samples each runtime comes to rest (subject.Rest). What an experiment needs of a runtime and what it measures
// is in experiments.go; a runtime that fails in one is left out of the rest of it, and the table says so.
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

	"golang.org/x/sys/unix"

	"berth/integration/bench/report"
	"berth/integration/bench/subject"
)

type options struct {
	berth   string // directory of programs
	peers   string
	image   string
	samples int
	rows    *regexp.Regexp
	dir     string // on a disk
	state   string // on tmpfs
	machine string // name of the cgroup for all of it

	external []string
}

func main() {
	o := options{rows: regexp.MustCompile("")}
	flag.StringVar(&o.berth, "berth", "bin", "directory of berth's programs")
	flag.StringVar(&o.peers, "peers", "", "directory of the programs of others; empty: none")
	flag.StringVar(&o.image, "image", "", "image of the pods, with sh, sleep and true; empty: one that a registry on loopback serves")
	flag.IntVar(&o.samples, "samples", 30, "samples of each row and runtime, where time allows")
	flag.Func("rows", "rows to measure: a regular expression that matches part of their keys", func(text string) (err error) {
		o.rows, err = regexp.Compile(text)
		return err
	})
	flag.StringVar(&o.dir, "dir", "", "directory on a disk for everything that outlives a reboot")
	flag.StringVar(&o.state, "state", "", "directory for everything that does not")
	flag.StringVar(&o.machine, "machine", os.Getenv("BERTH_MACHINE"), "cgroup below which everything is")
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
	if !selectsAny(o.rows) {
		return fmt.Errorf("-rows %q matches none of %v", o.rows, keys())
	}
	b := &bench{options: o}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.open(ctx); err != nil {
		return err
	}
	b.measure(ctx)
	fmt.Printf("%d CPUs, Linux %s, %s; medians / 99th percentiles of %d samples\n\n", goruntime.NumCPU(), kernel(), cgroups(), o.samples)
	if err := report.Table(os.Stdout, &b.results, b.columns(), b.selected); err != nil {
		return err
	}
	return ctx.Err()
}

func selectsAny(rows *regexp.Regexp) bool {
	for _, key := range keys() {
		if rows.MatchString(key) {
			return true
		}
	}
	return false
}

func keys() (all []string) {
	for _, row := range report.Rows {
		all = append(all, row.Key)
	}
	return all
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown version"
	}
	return unix.ByteSliceToString(u.Release[:])
}

func cgroups() string {
	if subject.Cgroup2() {
		return "cgroup v2"
	}
	return "cgroup v1"
}

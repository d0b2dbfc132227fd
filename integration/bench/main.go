// Command bench measures container runtimes over CRI, side by side, and prints a
// Markdown table:
//
//   - how long RunPodSandbox, CreateContainer and StartContainer take for a pod on
//     the host's network, one pod after another. Samples of several runtimes
//     alternate, so that all of them see the same neighbours;
//   - what a runtime keeps in memory per pod beside the container (shim or monitor,
//     and pause), and the daemon itself, with many pods running. The measure is PSS,
//     from /proc/PID/smaps_rollup.
//
// contrib/bench starts berth and calls it. Arguments are NAME=SOCKET, or
// NAME=SOCKET,CGROUP-PARENT.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

type options struct {
	image   string
	samples int
	pods    int
}

func main() {
	var o options
	flag.StringVar(&o.image, "image", "", "image with a sleep command, which every runtime can pull")
	flag.IntVar(&o.samples, "samples", 60, "pods started for the times, per runtime")
	flag.IntVar(&o.pods, "pods", 50, "pods that run while memory is measured")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := bench(ctx, o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func bench(ctx context.Context, o options, args []string) error {
	if len(args) == 0 || o.image == "" || o.samples < 1 || o.pods < 1 {
		return fmt.Errorf("usage: bench -image REF [-samples N] [-pods N] NAME=SOCKET[,CGROUP-PARENT]…")
	}
	logs, err := os.MkdirTemp("", "bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(logs)
	var runtimes []*runtime
	for _, arg := range args {
		r, err := connect(ctx, arg, o.image, logs)
		if err != nil {
			return err
		}
		defer r.close()
		runtimes = append(runtimes, r)
	}
	results := make([]result, len(runtimes))
	if err := measureTimes(ctx, runtimes, o.samples, results); err != nil {
		return err
	}
	for i, r := range runtimes {
		if results[i].memory, err = measureMemory(ctx, r, o.pods); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	printTable(os.Stdout, runtimes, results, o)
	return nil
}

package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
)

func statsCommand(o *Connection) *cobra.Command {
	var once, pods bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "stats [NAME…]",
		Short: "Show the CPU, memory and disk usage of containers",
		Long: `Show the usage of running containers, or of pods with --pods, until Ctrl-C. Without a
terminal, each table follows the previous one. CPU is the share of one CPU during the
last interval. Memory is the working set, as in kubelet. The limit is empty without one.`,
		Example: "  berth stats\n  berth stats --no-stream web/app\n  berth stats --pods -o json --no-stream",
	}
	out := addOutputFlag(cmd, outputTable, outputJSON, outputYAML, outputTemplate)
	cmd.Flags().BoolVar(&once, "no-stream", false, "print one table and exit")
	cmd.Flags().BoolVar(&pods, "pods", false, "show pods instead of containers")
	cli.DurationVar(cmd.Flags(), &interval, "interval", time.Second, "time between two measurements")
	cmd.ValidArgsFunction = o.completeNames(containerNames, podNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		const shortest = 100 * time.Millisecond
		if interval < shortest {
			return fmt.Errorf("--interval %v: want at least %v", interval, shortest)
		}
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		measure := func(ctx context.Context) ([]usage, error) { return containerUsage(ctx, c, args) }
		if pods {
			measure = func(ctx context.Context) ([]usage, error) { return podUsage(ctx, c, args) }
		}
		w := cmd.OutOrStdout()
		screen := &statsScreen{out: w, pods: pods}
		err := watchUsage(ctx, interval, measure, func(rows []usage) error {
			err := screen.print(out, rows)
			if err == nil && once {
				err = errEnough
			}
			return err
		})
		if errors.Is(err, errEnough) {
			return nil
		}
		return cli.Silent(cli.InterruptStatus(ctx, err))
	})
	return cmd
}

// errEnough ends a watch without an error.
var errEnough = errors.New("enough output")

// usage is a measurement of a container or pod.
type usage struct {
	ID           string  `json:"id"`
	Name         string  `json:"name"`       // pod/container, or namespace/pod
	CPUPercent   float64 `json:"cpuPercent"` // of one CPU
	Memory       uint64  `json:"memory"`     // working set in bytes
	MemoryLimit  uint64  `json:"memoryLimit,omitempty"`
	Disk         uint64  `json:"disk"`               // writable layers in bytes
	Received     *uint64 `json:"received,omitempty"` // bytes, only of pods
	Sent         *uint64 `json:"sent,omitempty"`     // bytes, only of pods
	Processes    *uint64 `json:"processes,omitempty"`
	cpu, sampled uint64  // nanoseconds
}

// watchUsage measures in intervals until ctx ends or show fails. The first measurement is only the
// base of the CPU's share.
func watchUsage(ctx context.Context, interval time.Duration, measure func(context.Context) ([]usage, error),
	show func([]usage) error) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var last []usage
	for first := true; ; first = false {
		rows, err := measure(ctx)
		if err != nil {
			return err
		}
		for i := range rows {
			rows[i].CPUPercent = cpuShare(last, rows[i])
		}
		if !first {
			if err := show(rows); err != nil {
				return err
			}
		}
		last = rows
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// cpuShare returns the CPU time since the last measurement in percent of one CPU.
func cpuShare(last []usage, now usage) float64 {
	i := slices.IndexFunc(last, func(u usage) bool { return u.ID == now.ID })
	if i < 0 || now.sampled <= last[i].sampled || now.cpu < last[i].cpu {
		return 0
	}
	return 100 * float64(now.cpu-last[i].cpu) / float64(now.sampled-last[i].sampled)
}

// statsScreen prints measurements. On a terminal it replaces the previous table.
type statsScreen struct {
	out  io.Writer
	pods bool
	more bool // a table was printed
}

func (s *statsScreen) print(out *output, rows []usage) error {
	if out.format != outputTable {
		return printValues(s.out, out, rows)
	}
	_, isTerminal := terminal.Size(s.out)
	separator := ""
	switch {
	case isTerminal:
		separator = "\x1b[H\x1b[2J" // home, erase the screen
	case s.more:
		separator = "\n"
	}
	s.more = true
	if _, err := io.WriteString(s.out, separator); err != nil {
		return err
	}
	header := cells("CONTAINER", "NAME", "CPU %", "MEMORY", "LIMIT", "MEMORY %", "DISK")
	if s.pods {
		header = cells("POD", "NAME", "CPU %", "MEMORY", "LIMIT", "MEMORY %", "NET IN / OUT", "PROCESSES")
	}
	table := [][]terminal.Cell{header}
	for _, u := range rows {
		table = append(table, u.cells(s.pods))
	}
	return terminal.Table(s.out, table)
}

func (u usage) cells(pods bool) []terminal.Cell {
	limit, share := "", ""
	if u.MemoryLimit > 0 {
		limit = terminal.Bytes(u.MemoryLimit)
		share = fmt.Sprintf("%.1f%%", 100*float64(u.Memory)/float64(u.MemoryLimit))
	}
	row := cells(client.ShortID(u.ID), u.Name, fmt.Sprintf("%.1f%%", u.CPUPercent), terminal.Bytes(u.Memory), limit, share)
	if !pods {
		return append(row, cells(terminal.Bytes(u.Disk))...)
	}
	network, processes := "", ""
	if u.Received != nil && u.Sent != nil {
		network = terminal.Bytes(*u.Received) + " / " + terminal.Bytes(*u.Sent)
	}
	if u.Processes != nil {
		processes = strconv.FormatUint(*u.Processes, 10)
	}
	return append(row, cells(network, processes)...)
}

// containerUsage measures the running containers, or those that refs name.
func containerUsage(ctx context.Context, c *client.Client, refs []string) ([]usage, error) {
	names, err := selectContainers(ctx, c, refs)
	if err != nil {
		return nil, err
	}
	reply, err := c.ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{})
	if err != nil {
		return nil, fmt.Errorf("measure containers: %w", err)
	}
	var rows []usage
	for _, s := range reply.GetStats() {
		name, selected := names[s.GetAttributes().GetId()]
		if !selected {
			continue
		}
		row := usage{ID: s.GetAttributes().GetId(), Name: name, Disk: s.GetWritableLayer().GetUsedBytes().GetValue()}
		row.add(s.GetCpu(), s.GetMemory())
		rows = append(rows, row)
	}
	sortUsage(rows)
	return rows, nil
}

// podUsage measures the ready pods, or those that refs name.
func podUsage(ctx context.Context, c *client.Client, refs []string) ([]usage, error) {
	selected := map[string]bool{}
	for _, ref := range refs {
		pod, err := c.FindPod(ctx, ref)
		if err != nil {
			return nil, err
		}
		selected[pod.GetId()] = true
	}
	reply, err := c.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})
	if err != nil {
		return nil, fmt.Errorf("measure pods: %w", err)
	}
	var rows []usage
	for _, s := range reply.GetStats() {
		id, meta := s.GetAttributes().GetId(), s.GetAttributes().GetMetadata()
		if len(refs) > 0 && !selected[id] {
			continue
		}
		row := usage{ID: id, Name: meta.GetNamespace() + "/" + meta.GetName()}
		row.add(s.GetLinux().GetCpu(), s.GetLinux().GetMemory())
		if network := s.GetLinux().GetNetwork().GetDefaultInterface(); network != nil {
			received, sent := network.GetRxBytes().GetValue(), network.GetTxBytes().GetValue()
			row.Received, row.Sent = &received, &sent
		}
		if count := s.GetLinux().GetProcess().GetProcessCount(); count != nil {
			row.Processes = &count.Value
		}
		rows = append(rows, row)
	}
	sortUsage(rows)
	return rows, nil
}

// selectContainers returns the names of the containers to measure by their IDs: those that refs
// name, the containers of pods that refs name, or all.
func selectContainers(ctx context.Context, c *client.Client, refs []string) (map[string]string, error) {
	selected := map[string]bool{}
	for _, ref := range refs {
		container, pod, err := c.Find(ctx, ref)
		if err != nil {
			return nil, err
		}
		selected[container.GetId()+pod.GetId()] = true // one of them is empty
	}
	all, err := c.Containers(ctx)
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for _, container := range all {
		if len(refs) == 0 || selected[container.GetId()] || selected[container.GetPodSandboxId()] {
			names[container.GetId()] = client.ContainerName(container)
		}
	}
	return names, nil
}

// add adds CPU and memory, which may be unknown.
func (u *usage) add(cpu *runtimeapi.CpuUsage, memory *runtimeapi.MemoryUsage) {
	u.cpu, u.sampled = cpu.GetUsageCoreNanoSeconds().GetValue(), uint64(cpu.GetTimestamp())
	u.Memory = memory.GetWorkingSetBytes().GetValue()
	if available := memory.GetAvailableBytes().GetValue(); available > 0 { // 0 without a limit
		u.MemoryLimit = u.Memory + available
	}
}

func sortUsage(rows []usage) {
	slices.SortFunc(rows, func(a, b usage) int { return strings.Compare(a.Name+a.ID, b.Name+b.ID) })
}

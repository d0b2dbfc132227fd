package operator

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
)

func topCommand(o *Connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top CONTAINER|POD",
		Short: "List the processes of a container",
		Long: `List the processes of a container, with their process and user IDs on the host. The
container needs no ps program. The command must run on the node.`,
		Args: cli.Args(1, 1, "name a container or pod"),
	}
	out := addOutputFlag(cmd, outputTable, outputJSON, outputYAML, outputTemplate)
	containerName := o.addContainerFlag(cmd)
	cmd.ValidArgsFunction = o.completeNames(runningNames, podNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		container, err := findRunning(cmd.Context(), c, args[0], *containerName)
		if err != nil {
			return err
		}
		p, err := openProcess(cmd.Context(), c, container)
		if err != nil {
			return err
		}
		defer p.close()
		rows, err := p.list()
		if err != nil {
			return fmt.Errorf("list the processes of container %s: %w", p.container, err)
		}
		if out.format != outputTable {
			return printValues(cmd.OutOrStdout(), out, rows)
		}
		table := [][]terminal.Cell{cells("USER", "PID", "PPID", "STATE", "MEMORY", "CPU TIME", "COMMAND")}
		for _, r := range rows {
			table = append(table, cells(r.User, strconv.Itoa(r.PID), strconv.Itoa(r.Parent), r.State, terminal.Bytes(r.Memory),
				(time.Duration(r.CPUSeconds*1000)*time.Millisecond).String(), r.Command))
		}
		return terminal.Table(cmd.OutOrStdout(), table)
	})
	return cmd
}

// processRow is a process of a container.
type processRow struct {
	PID        int     `json:"pid"` // on the host
	Parent     int     `json:"ppid"`
	User       string  `json:"user"`   // on the host: a name, or a number without one
	State      string  `json:"state"`  // letter of proc(5)
	Memory     uint64  `json:"memory"` // resident bytes
	CPUSeconds float64 `json:"cpuSeconds"`
	Command    string  `json:"command"`
}

// list returns the processes in the container's cgroup and below it. It drops processes that exit
// meanwhile.
func (p *process) list() ([]processRow, error) {
	group, err := cgroupOf(p.pid)
	if err != nil {
		return nil, err
	}
	if err := p.alive(); err != nil { // else the process ID may have been reused
		return nil, err
	}
	var rows []processRow
	err = filepath.WalkDir(group, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && !entry.IsDir() {
			return nil
		}
		if err != nil {
			return err
		}
		pids, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, pid := range strings.Fields(string(pids)) {
			if row, err := readProcess(pid); err == nil {
				rows = append(rows, row)
			}
		}
		return nil
	})
	return rows, err
}

// cgroupOf returns the directory of a process's cgroup. On cgroup v1 it uses the controller pids.
func cgroupOf(pid int) (string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	unified := ""
	for line := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(fields) != 3 || strings.HasPrefix(fields[2], "/.."):
		case fields[1] == "pids":
			return filepath.Join("/sys/fs/cgroup/pids", fields[2]), nil
		case fields[1] == "":
			unified = filepath.Join("/sys/fs/cgroup", fields[2])
		}
	}
	if unified == "" {
		return "", errors.New("no cgroup found")
	}
	return unified, nil
}

// Constants of proc(5).
const (
	ticksPerSecond = 100 // USER_HZ, the same on all architectures of Kubernetes
	statFields     = 22
)

// readProcess reads a process from /proc. The process chooses its command line, which may contain
// any bytes.
func readProcess(id string) (processRow, error) {
	row := processRow{}
	var err error
	if row.PID, err = strconv.Atoi(id); err != nil {
		return row, err
	}
	dir := "/proc/" + id
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return row, err
	}
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')') // the name may contain parentheses
	if open < 0 || end < open {
		return row, errors.New("malformed stat")
	}
	fields := strings.Fields(string(stat[end+1:])) // field 3 of proc(5) is the first
	if len(fields) < statFields {
		return row, errors.New("malformed stat")
	}
	number := func(i int) uint64 {
		n, _ := strconv.ParseUint(fields[i], 10, 64) // the kernel prints numbers
		return n
	}
	row.State, row.Parent = fields[0], int(number(1))
	row.CPUSeconds = float64(number(11)+number(12)) / ticksPerSecond
	row.Memory = number(21) * uint64(os.Getpagesize())
	command, err := os.ReadFile(dir + "/cmdline")
	if err != nil {
		return row, err
	}
	row.Command = strings.TrimSpace(strings.ReplaceAll(string(command), "\x00", " "))
	if row.Command == "" { // a zombie
		row.Command = "[" + string(stat[open+1:end]) + "]"
	}
	info, err := os.Stat(dir)
	if err != nil {
		return row, err
	}
	row.User = userName(info)
	return row, nil
}

// userName returns the name of a file's owner, or the number if the host has no such user.
func userName(info fs.FileInfo) string {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	id := strconv.FormatUint(uint64(st.Uid), 10)
	if u, err := user.LookupId(id); err == nil {
		return u.Username
	}
	return id
}

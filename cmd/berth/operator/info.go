package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
	"berth/internal/version"
)

func versionCommand(o *Connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the versions of this program and of the runtime",
		Long: `Show the versions of this program and of the runtime at the socket. The exit code is
1 if no runtime answers. "berth --version" does not connect to a runtime.`,
		Args: cli.NoArgs,
	}
	out := addOutputFlag(cmd, outputTable, outputJSON, outputYAML, outputTemplate)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		v := versions{Client: programVersion{version.Full(), runtime.Version()}}
		err := o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
			reply, err := c.Version(cmd.Context(), &runtimeapi.VersionRequest{})
			if err != nil {
				return fmt.Errorf("version of the runtime: %w", err)
			}
			v.Runtime = &runtimeVersion{reply.GetRuntimeName(), reply.GetRuntimeVersion(), reply.GetRuntimeApiVersion()}
			return nil
		})(cmd, args)
		if printErr := printVersions(cmd.OutOrStdout(), out, v); printErr != nil {
			return printErr
		}
		return err
	}
	return cmd
}

// versions is the JSON form of version.
type versions struct {
	Client  programVersion  `json:"client"`
	Runtime *runtimeVersion `json:"runtime,omitempty"`
}

type programVersion struct {
	Version string `json:"version"`
	Go      string `json:"go"`
}

type runtimeVersion struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	CRI     string `json:"cri"`
}

func printVersions(w io.Writer, out *output, v versions) error {
	if out.format != outputTable {
		return printValue(w, out, v)
	}
	table := [][]terminal.Cell{cells("Client:", "berth "+v.Client.Version+" ("+v.Client.Go+")")}
	if r := v.Runtime; r != nil {
		table = append(table, cells("Runtime:", r.Name+" "+r.Version+" (CRI "+r.CRI+")"))
	}
	return terminal.Table(w, table)
}

func infoCommand(o *Connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "info",
		Short: "Show the state of the runtime",
		Long: `Show the runtime at the socket: its version, whether it and its network are ready, its
handlers, and how many pods, containers and images it has. "-o json" adds the
runtime's own details; berth's are its configuration, pulls and waits.`,
		Args: cli.NoArgs,
	}
	out := addOutputFlag(cmd, outputTable, outputJSON, outputYAML, outputTemplate)
	cmd.RunE = o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
		info, err := runtimeInfo(cmd.Context(), c)
		if err != nil {
			return err
		}
		if out.format != outputTable {
			return printValue(cmd.OutOrStdout(), out, info)
		}
		return terminal.Table(cmd.OutOrStdout(), info.table())
	})
	return cmd
}

// nodeInfo is the JSON form of info.
type nodeInfo struct {
	Socket       string                     `json:"socket"`
	Runtime      runtimeVersion             `json:"runtime"`
	Conditions   []nodeCondition            `json:"conditions"`
	Handlers     []string                   `json:"handlers"` // the default's name is empty
	CgroupDriver string                     `json:"cgroupDriver,omitempty"`
	Pods         int                        `json:"pods"`
	PodsReady    int                        `json:"podsReady"`
	Containers   int                        `json:"containers"`
	Running      int                        `json:"containersRunning"`
	Images       int                        `json:"images"`
	Info         map[string]json.RawMessage `json:"info,omitempty"` // the runtime's own
}

type nodeCondition struct {
	Type    string `json:"type"`
	Status  bool   `json:"status"`
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

func runtimeInfo(ctx context.Context, c *client.Client) (*nodeInfo, error) {
	version, err := c.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return nil, fmt.Errorf("version of the runtime: %w", err)
	}
	status, err := c.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return nil, fmt.Errorf("status of the runtime: %w", err)
	}
	info := &nodeInfo{Socket: c.Socket, Handlers: []string{},
		Runtime: runtimeVersion{version.GetRuntimeName(), version.GetRuntimeVersion(), version.GetRuntimeApiVersion()}}
	for _, condition := range status.GetStatus().GetConditions() {
		info.Conditions = append(info.Conditions, nodeCondition{condition.GetType(), condition.GetStatus(),
			condition.GetReason(), condition.GetMessage()})
	}
	for _, handler := range status.GetRuntimeHandlers() {
		info.Handlers = append(info.Handlers, handler.GetName())
	}
	detail, err := newInspected(status.GetStatus(), status.GetInfo())
	if err != nil {
		return nil, err
	}
	info.Info = detail.Info
	if config, err := c.RuntimeConfig(ctx, &runtimeapi.RuntimeConfigRequest{}); err == nil { // older runtimes lack the call
		info.CgroupDriver = strings.ToLower(config.GetLinux().GetCgroupDriver().String())
	}
	return info, info.count(ctx, c)
}

// count counts the runtime's objects.
func (n *nodeInfo) count(ctx context.Context, c *client.Client) error {
	pods, err := c.Pods(ctx)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		n.Pods++
		if pod.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY {
			n.PodsReady++
		}
	}
	containers, err := c.Containers(ctx)
	if err != nil {
		return err
	}
	for _, container := range containers {
		n.Containers++
		if container.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			n.Running++
		}
	}
	images, err := imageRows(ctx, c)
	n.Images = len(images)
	return err
}

func (n *nodeInfo) table() [][]terminal.Cell {
	table := [][]terminal.Cell{
		cells("Runtime:", n.Runtime.Name+" "+n.Runtime.Version+" (CRI "+n.Runtime.CRI+")"),
		cells("Socket:", n.Socket),
	}
	for _, condition := range n.Conditions {
		row := cells(condition.Type+":", strconv.FormatBool(condition.Status))
		row[1].Color = terminal.Green
		if !condition.Status {
			row[1] = terminal.Cell{Text: "false: " + condition.Reason + ": " + condition.Message, Color: terminal.Red}
		}
		table = append(table, row)
	}
	handlers := make([]string, 0, len(n.Handlers))
	for _, name := range n.Handlers {
		if name == "" {
			name = "(default)"
		}
		handlers = append(handlers, name)
	}
	table = append(table, cells("Handlers:", strings.Join(handlers, ", ")))
	if n.CgroupDriver != "" {
		table = append(table, cells("Cgroup driver:", n.CgroupDriver))
	}
	return append(table,
		cells("Pods:", fmt.Sprintf("%d, %d ready", n.Pods, n.PodsReady)),
		cells("Containers:", fmt.Sprintf("%d, %d running", n.Containers, n.Running)),
		cells("Images:", strconv.Itoa(n.Images)))
}

package operator

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"berth/cmd/berth/client"
)

// completionTimeout bounds the completion of a name, which blocks the shell.
const completionTimeout = 2 * time.Second

// nameSource lists names for the shell's completion. A description may follow a name after a tab.
type nameSource func(ctx context.Context, c *client.Client) ([]string, error)

// completeNames returns a completion function with the names of a runtime's objects.
func (o *Connection) completeNames(sources ...nameSource) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
		defer cancel()
		c, err := client.Dial(ctx, o.Socket)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		defer c.Close()
		given := map[string]bool{}
		for _, arg := range args {
			given[arg] = true
		}
		var names []string
		for _, source := range sources {
			list, err := source(ctx, c)
			if err != nil {
				continue
			}
			for _, entry := range list {
				name, _, _ := strings.Cut(entry, "\t")
				if strings.HasPrefix(name, typed) && !given[name] {
					names = append(names, entry)
				}
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// CompleteImages completes the tags of images.
func (o *Connection) CompleteImages(
	cmd *cobra.Command, args []string, typed string,
) ([]string, cobra.ShellCompDirective) {
	return o.completeNames(imageNames)(cmd, args, typed)
}

// completeFirst completes only the first argument.
func completeFirst(f cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return f(cmd, args, typed)
	}
}

// containerNames lists containers as pod/container, and by ID.
func containerNames(ctx context.Context, c *client.Client) ([]string, error) {
	return namesOf(containerRows(ctx, c, true))
}

func namesOf(rows []containerRow, err error) (names []string, _ error) {
	for _, r := range rows {
		name := r.Name
		if r.Pod != "" {
			name = r.Pod + "/" + r.Name
		}
		names = append(names, name+"\tcontainer, "+r.State, client.ShortID(r.ID)+"\t"+name)
	}
	return names, err
}

// runningNames is containerNames for running containers.
func runningNames(ctx context.Context, c *client.Client) ([]string, error) {
	return namesOf(containerRows(ctx, c, false))
}

// containersOfPod lists the names of a pod's containers. ref identifies the pod.
func containersOfPod(ref string) nameSource {
	return func(ctx context.Context, c *client.Client) (names []string, err error) {
		pod, err := c.FindPod(ctx, ref)
		if err != nil {
			return nil, err
		}
		rows, err := containerRows(ctx, c, true)
		for _, r := range rows {
			if r.PodID == pod.GetId() {
				names = append(names, r.Name+"\t"+r.State)
			}
		}
		return names, err
	}
}

// podNames lists pods by name and by ID.
func podNames(ctx context.Context, c *client.Client) (names []string, err error) {
	pods, err := c.Pods(ctx)
	for _, pod := range pods {
		meta := pod.GetMetadata()
		names = append(names, meta.GetName()+"\tpod in "+meta.GetNamespace(),
			client.ShortID(pod.GetId())+"\tpod "+meta.GetName())
	}
	return names, err
}

// imageNames lists the tags of images.
func imageNames(ctx context.Context, c *client.Client) (names []string, err error) {
	rows, err := imageRows(ctx, c)
	for _, r := range rows {
		for _, tag := range r.Tags {
			names = append(names, tag+"\timage")
		}
	}
	return names, err
}

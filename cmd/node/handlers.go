package node

import (
	"berth/cmd/config"
	"berth/sandbox/handler"
)

// taskProgram is the name of the program that calls shims.
const taskProgram = "berth-task"

// Handlers returns the configured runtime handlers. If berth-task is not found, the probe of a
// handler that needs it fails.
func Handlers(cfg *config.Config) map[string]handler.Config {
	all := map[string]handler.Config{}
	for name, h := range cfg.Handlers {
		one := handler.Config{Path: h.Path, Args: h.Args, WithoutHostDevices: h.WithoutHostDevices,
			Annotations: handler.Annotations{OfPods: h.PodAnnotations, OfContainers: h.ContainerAnnotations}}
		if h.Type == "shim" {
			one.Options = h.Options
			var err error
			if one.Task, err = findProgram(taskProgram, "container.task_path", cfg.TaskPath); err != nil {
				one.Task = taskProgram
			}
		}
		all[name] = one
	}
	return all
}

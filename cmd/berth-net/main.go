// Command berth-net provides berth's built-in network as a CNI plugin for any runtime that executes
// plugins. Packages install it in the directory of plugins of their distributions. The daemon berth
// calls the plugin as a function instead.
package main

import "berth/cni/berthnet"

func main() { berthnet.Main() }
